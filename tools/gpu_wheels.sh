#!/usr/bin/env bash
# Put the wheels that `make gpu` needs into gpu-wheels/, for a machine with a GPU, its own PyTorch and no
# internet. Called by make. GPU_PYTHON_VERSION: the Python of that machine; GPU_WHEELS: another directory.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${GPU_PYTHON_VERSION:-3.12}
target=${GPU_WHEELS:-gpu-wheels}
# What Forge imports and images with PyTorch often lack. Of the rest, torch, numpy and transformers above
# all, the checks are to run with what the image has. Without gigatoken, which is large, tokenizers encode.
packages=(annotated-types blake3 orjson pydantic pydantic_core pytest-timeout torchao typing_extensions typing-inspection)
platforms=()
for platform in manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64; do
    platforms+=(--platform "$platform")
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch"
mkdir -p "$target"
rm -f "$target"/*.whl # of another version: both cannot be installed
"$scratch/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version "$version" "${platforms[@]}" --dest "$target" \
    --constraint constraints.txt "${packages[@]}"
echo "gpu-wheels: $(find "$target" -name '*.whl' | wc -l) wheels for Python $version in $target," \
    "$(du -sh "$target" | cut -f1). Copy the checkout with them to the machine, then: make gpu"
