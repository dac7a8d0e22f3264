#!/usr/bin/env bash
# Check Forge on this machine's GPU with its own Python and PyTorch: tests/gpu. Called by make; needs
# neither .venv nor internet. Options go to pytest. GPU_PYTHON: the Python; GPU_WHEELS: wheels to add to it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GPU_PYTHON:-python3}
wheels=${GPU_WHEELS:-gpu-wheels}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$wheels/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$(pwd):$site${PYTHONPATH:+:$PYTHONPATH}"
# One process for both questions: an import of torch takes seconds. 3: there is no GPU.
status=0
said=$("$python" -c 'import sys, pytest, torch, forge.cli, forge.worker, forge.trainer.loop
sys.exit(0 if torch.cuda.is_available() else 3)' 2>&1) || status=$?
if [ $status = 3 ] && [ "${FORGE_GPU_CHECKS:-}" != cpu ]; then
    echo "gpu: PyTorch of $python sees no GPU." >&2
    echo "  fix: see nvidia-smi and CUDA_VISIBLE_DEVICES; FORGE_GPU_CHECKS=cpu runs what a CPU can" >&2
    exit 69
elif [ $status != 3 ] && [ $status != 0 ]; then
    echo "gpu: $python cannot import what Forge needs: $(tail -n 1 <<<"$said")" >&2
    echo "  fix: install it there; without internet: make gpu-wheels GPU_PYTHON_VERSION=3.12 elsewhere," \
        "and copy the directory gpu-wheels here" >&2
    exit 69
fi
if [ $status = 0 ]; then
    export FORGE_GPU_CHECKS=gpu # PyTorch sees one, wherever its device file is
fi
"$python" -m pytest tests/gpu -p no:cacheprovider "$@"
