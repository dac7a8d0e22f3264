#!/usr/bin/env bash
# Put every package of constraints.txt as a wheel into a directory, for machines without internet. Called by
# make.
# PYTHON and its platform decide which wheels; PIP_EXTRA_INDEX_URL may name an index with another build of
# torch (CPU or a CUDA version), whose local version (2.13.0+…) pip prefers.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${WHEELHOUSE:-wheelhouse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch"
mkdir -p "$target"
echo "wheelhouse: downloading into $target …"
# As wheels, since a few packages have none and the other machine could not build them. setuptools builds
# the project itself there.
"$scratch/bin/pip" wheel --quiet --disable-pip-version-check --wheel-dir "$target" \
    --constraint constraints.txt '.[dev,bench]' "$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)"
rm -f "$target"/forge-*
echo "wheelhouse: $(find "$target" -type f | wc -l) files, $(du -sh "$target" | cut -f1)." \
    "Copy it to the cluster, then: make train WHEELHOUSE=$target"
