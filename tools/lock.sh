#!/usr/bin/env bash
# Renew constraints.txt from what is installed in .venv now.
set -euo pipefail
cd "$(dirname "$0")/.."
{
    echo "# Exact versions of everything that pyproject.toml pulls in, so that two installs are the same."
    echo "# Renew: make lock"
    # The CPU and the CUDA build of torch carry a local version (+cpu) that only one of them has.
    .venv/bin/python -m pip freeze --exclude-editable --exclude forge | sed 's/+[a-z0-9.]*$//' | sort -f
} >constraints.txt
