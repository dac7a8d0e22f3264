#!/usr/bin/env bash
# Rehearse tools/gpu_quarter.sh without a GPU, in an environment with the packages of a machine that has one: Python
# 3.12 and the build of PyTorch 2.11 for CUDA, of tools/gpu_machine.txt (6 GB on disk, minutes to download).
# REHEARSAL: directory of the environment, which stays; PYTHON: a Python 3.12. Arguments go to gpu_quarter.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${REHEARSAL:-build/gpu-rehearsal} python=${PYTHON:-python3.12}
[ -x "$place/bin/python" ] || "$python" -m venv "$place"
"$place/bin/pip" install --quiet --disable-pip-version-check --requirement tools/gpu_machine.txt
GPU_PYTHON_VERSION=3.12 GPU_WHEELS=$place/wheels PYTHON=$python tools/gpu_wheels.sh
place=$(cd "$place" && pwd)
GPU_PYTHON=$place/bin/python GPU_WHEELS=$place/wheels GPU_QUICK=1 GPU_OUT=${GPU_OUT:-$place/results} \
    GPU_SECONDS=${GPU_SECONDS:-900} exec tools/gpu_quarter.sh "$@"
