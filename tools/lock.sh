#!/usr/bin/env bash
# Renew constraints.txt from what is installed in .venv now, and hashes.txt from the index.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
export LC_ALL=C
{
    echo "# Exact versions of everything that pyproject.toml pulls in, so that two installs are the same."
    echo "# Renew: make lock"
    # The CPU and the CUDA build of torch carry a local version (+cpu) that only one of them has.
    $uv pip freeze --quiet --python .venv/bin/python --exclude-editable | sed '/^pip==/d; s/+[a-z0-9.]*$//' | sort -f
} >constraints.txt
{
    echo "# Digests of every file of these versions, for all machines and Pythons, which uv checks. Without torch:"
    echo "# each build of it (CPU, versions of CUDA) has others. Renew: make lock"
    sed '/^torch==/d' constraints.txt | $uv pip compile --quiet --universal --python-version 3.11 --no-deps \
        --generate-hashes --no-header --no-annotate -
} >hashes.txt
