#!/usr/bin/env bash
# Draw the workflow into build/: dag.* (every job) and rulegraph.* (every rule).
set -euo pipefail
cd "$(dirname "$0")/.."
snakemake=(.venv/bin/snakemake --profile "${1:-profiles/local}" --quiet host progress rules)
export PYTHONHASHSEED=0 # else the order of nodes changes from call to call
mkdir -p build
# --forceall: a finished run is drawn as a whole, too.
"${snakemake[@]}" --forceall --dag dot train >build/dag.dot
"${snakemake[@]}" --forceall --rulegraph dot train >build/rulegraph.dot
"${snakemake[@]}" --forceall --rulegraph mermaid-js train >build/rulegraph.mmd
if command -v dot >/dev/null; then
    for name in dag rulegraph; do
        dot -Tsvg "build/$name.dot" -o "build/$name.svg"
    done
    echo "build/dag.svg build/rulegraph.svg"
else
    echo "build/dag.dot build/rulegraph.dot build/rulegraph.mmd (install graphviz to get SVG pictures)"
fi
