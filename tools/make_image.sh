#!/bin/sh
# What `Containerfile` and `forge.def` run inside of an image of Debian 12: Forge and its packages in /opt/forge,
# in the versions of constraints.txt. $1: the directory with the source. Options of pip come from its variables.
set -eu
source=$1
apt-get update
# git tells the lineage of a checkpoint which commit of the project trained; ps and setsid are for people.
apt-get install -y --no-install-recommends python3 python3-venv git ca-certificates procps util-linux
rm -rf /var/lib/apt/lists/*
python3 -m venv /opt/forge
/opt/forge/bin/pip install --no-cache-dir --constraint "$source/constraints.txt" "$source"
/opt/forge/bin/python -c 'import forge.worker, torch; print("forge", forge.__version__, "torch", torch.__version__)'
