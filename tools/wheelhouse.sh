#!/usr/bin/env bash
# Put every package of constraints.txt into a directory, for machines without internet. Called by make.
# PYTHON and its platform decide which files; PIP_EXTRA_INDEX_URL may name an index with another build of
# torch (CPU or a CUDA version), whose local version (2.13.0+…) pip prefers.
set -euo pipefail
cd "$(dirname "$0")/.."
target=${WHEELHOUSE:-wheelhouse}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch"
mkdir -p "$target"
rm -f "$target"/*.whl "$target"/*.tar.gz "$target"/*.zip # of another version of Forge: set-up would refuse them
echo "wheelhouse: downloading into $target …"
download() {
    "$scratch/bin/pip" download --quiet --disable-pip-version-check --dest "$target" --constraint constraints.txt "$@"
}
# As the index has them, since set-up compares digests: a few packages have no wheel, and are built there, like
# the project itself, with setuptools and wheel.
download '.[dev]' setuptools wheel
download '.[gigatoken]' || echo "wheelhouse: without gigatoken, which could not be had: tokenizing will be slower"
rm -f "$target"/forge-*
echo "wheelhouse: $(find "$target" -type f | wc -l) files, $(du -sh "$target" | cut -f1)." \
    "Copy it to the cluster, then: make train WHEELHOUSE=$target"
