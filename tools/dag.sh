#!/usr/bin/env bash
# Draw the workflow: docs/dag.* (every job) and docs/rulegraph.* (every rule).
set -euo pipefail
cd "$(dirname "$0")/.."
snakemake=(.venv/bin/snakemake --profile "${1:-profiles/local}" --quiet all)
export PYTHONHASHSEED=0 # else the order of nodes changes from call to call
mkdir -p docs
# --forceall: a finished run is drawn as a whole, too.
"${snakemake[@]}" --forceall --dag dot train >docs/dag.dot
"${snakemake[@]}" --forceall --rulegraph dot train >docs/rulegraph.dot
"${snakemake[@]}" --forceall --rulegraph mermaid-js train >docs/rulegraph.mmd
if command -v dot >/dev/null; then
    for name in dag rulegraph; do
        dot -Tsvg "docs/$name.dot" -o "docs/$name.svg"
    done
    echo "docs/dag.svg docs/rulegraph.svg"
else
    echo "docs/dag.dot docs/rulegraph.dot docs/rulegraph.mmd (install graphviz to get SVG pictures)"
fi
