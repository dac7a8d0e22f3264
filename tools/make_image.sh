#!/bin/sh
# What `Containerfile` and `forge.def` run inside of an image of Debian 12: Forge and its packages in /opt/forge,
# in the versions of constraints.txt, with the digests of hashes.txt. $1: the directory with the source. Options of
# pip and uv come from their variables.
set -eu
source=$1
apt-get update
# git tells the lineage of a checkpoint which commit of the project trained; ps and setsid are for people.
apt-get install -y --no-install-recommends python3 python3-venv git ca-certificates procps util-linux
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/forge
# pip compares no digest of what it resolves; uv does.
sed -n '/^uv==/,/[^\\]$/p' "$source/hashes.txt" >/tmp/uv.txt
/opt/forge/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/uv.txt
/opt/forge/bin/uv pip install --no-cache --compile-bytecode --python /opt/forge/bin/python \
    ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"} ${PIP_EXTRA_INDEX_URL:+--index "$PIP_EXTRA_INDEX_URL" --index-strategy unsafe-best-match} \
    --constraint "$source/constraints.txt" --constraint "$source/hashes.txt" \
    --build-constraints "$source/hashes.txt" "$source"
/opt/forge/bin/pip uninstall --yes uv
rm /tmp/uv.txt
/opt/forge/bin/python -c 'import forge.worker, torch; print("forge", forge.__version__, "torch", torch.__version__)'
