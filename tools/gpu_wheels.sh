#!/usr/bin/env bash
# Put the wheels that `make gpu` needs into gpu-wheels/, for a machine with a GPU, its own PyTorch and no
# internet. Called by make. GPU_PYTHON_VERSION: the Python of that machine; GPU_WHEELS: another directory.
# GPU_WHEELS_FOR=train adds Forge, and Snakemake with its packages in the versions of .venv, to train there by the
# workflow (docs/gpu.md).
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
if [ "${GPU_WHEELS_FOR:-}" = train ]; then
    # All that Snakemake and its plugin need here, without what that machine or the list above has.
    mapfile -t needed < <(.venv/bin/python - tools/gpu_machine.txt "${packages[@]}" <<'EOF'
import re, sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

lines = Path(sys.argv[1]).read_text().splitlines()
there = {plain(re.split("[=<>]", line)[0]) for line in lines if line[:1] != "#"} | {*map(plain, sys.argv[2:])}
found, left = {}, ["snakemake", "snakemake-executor-plugin-slurm", "cryptography"]
while left:
    name = plain(left.pop())
    if name in found or name in there:
        continue
    try:
        found[name] = version(name)
    except PackageNotFoundError:  # of another platform
        continue
    named = [re.match(r"[\w.-]+", line)[0] for line in requires(name) or () if "extra ==" not in line]
    left += named
print(*(f"{name}=={number}" for name, number in sorted(found.items())), sep="\n")
EOF
    )
    "$scratch/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$target" .
    for package in "${needed[@]}"; do
        "$scratch/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
            --implementation cp --python-version "$version" "${platforms[@]}" --dest "$target" "$package" 2>/dev/null ||
            # A few have no wheel. Of Python alone, or for the Python that is here.
            "$scratch/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$target" "$package"
    done
fi
echo "gpu-wheels: $(find "$target" -name '*.whl' | wc -l) wheels for Python $version in $target," \
    "$(du -sh "$target" | cut -f1). Copy the checkout with them to the machine, then: make gpu"
