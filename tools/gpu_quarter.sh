#!/usr/bin/env bash
# All that docs/gpu.md has a table for, from a GPU that is to be had for a quarter of an hour, by one command:
#   tools/gpu_quarter.sh contact    4 minutes: does it work?
#   tools/gpu_quarter.sh measure    6 minutes: how fast is it? After what contact showed is mended.
#   tools/gpu_quarter.sh            both, 8 minutes
#   GPU_QUICK=1 tools/gpu_quarter.sh    the same parts at tiny sizes, also on a CPU: a rehearsal
# Needs neither .venv nor internet: GPU_PYTHON, its PyTorch, and the wheels of `make gpu-wheels`. GPU_OUT:
# where results go, as they come: quarter.log facts.txt contact.jsonl checks.jsonl bench.jsonl run.json. Each part has
# a limit, at which all of its processes are killed, and cannot stop the next one. The last line says which parts
# failed; the exit status is 1 where any did.
set -uo pipefail
cd "$(dirname "$0")/.."
parts=${1:-both} out=${GPU_OUT:-build/gpu} python=${GPU_PYTHON:-python3} wheels=${GPU_WHEELS:-gpu-wheels} quick=${GPU_QUICK:-}
case $parts in
contact) seconds=240 ;;
measure) seconds=360 ;;
both) seconds=480 ;;
*)
    sed -n '2,6s/^# *//p' "$0" >&2
    exit 78
    ;;
esac
now() { date +%s; }
end=$(($(now) + ${GPU_SECONDS:-$seconds}))
mkdir -p "$out"
out=$(cd "$out" && pwd)
exec > >(tee -a "$out/quarter.log") 2>&1
failed=$(mktemp)
site=$(mktemp -d)
trap 'rm -rf "$site" "$failed"' EXIT

kill_part() { # NAME: also what has a session of its own, as ranks, monitors and workers of the compiler
    local environ pid
    while read -r environ; do
        pid=${environ//[!0-9]/}
        [ "$pid" = $$ ] || kill -9 "$pid" 2>/dev/null
    done < <(grep -lzxs "GPU_PART=$1" /proc/[0-9]*/environ)
}
part() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2 began left status=0
    began=$(now)
    left=$((end - began))
    shift 2
    if ((left < 8)); then
        echo "== $name: left out, the time is up"
        echo "$name" >>"$failed"
        return
    fi
    ((limit < left)) || limit=$left
    echo "== $name: begins, at most $limit s"
    GPU_PART=$name timeout --signal=KILL "$limit" "$@" </dev/null || status=$?
    kill_part "$name"
    echo "== $name: exit $status after $(($(now) - began)) s"
    # 5: pytest found no check of these names, as on a CPU.
    [ $status = 0 ] || [ $status = 5 ] || echo "$name" >>"$failed"
}
checks() { # NAME LIMIT PYTEST-OPTIONS...
    local name=$1 limit=$2
    shift 2
    FORGE_GPU_CHECKS=$where FORGE_GPU_RESULTS=$out/checks.jsonl part "$name" "$limit" \
        "$python" -m pytest -p no:cacheprovider -q --timeout="$patience" "$@"
}
files() { printf 'tests/gpu/test_%s.py\n' "$@"; }
bench() { # SIZES SECONDS OPTIONS...
    part "bench $1" $(($2 + 20)) "$python" -m bench.gpu --sizes "$1" --seconds "$2" --json "$out/bench.jsonl" "${@:3}"
}

export PYTHONPATH="$(pwd):$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if compgen -G "$wheels/*.whl" >/dev/null; then
    part wheels 40 "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$site" "$wheels"/*.whl
fi
part facts 15 bash -c "nvidia-smi -q; lscpu; free -g; df -h /tmp; '$python' -m pip list" >>"$out/facts.txt" 2>&1
where=gpu patience=60
timeout 60 "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || where=cpu patience=300

if [ "$parts" != measure ]; then
    part contact 60 "$python" tools/gpu_contact.py "$out/contact.jsonl" # a cold import of torch is slow
    # At once: the first mostly waits for processes to start, the second computes.
    if [ -z "$quick" ]; then
        checks runs 200 $(files resume validation logits failures program ranks preflight) &
        runs=$!
        checks numbers 150 $(files whole_step attention documents accumulation adamw loss nonfinite replication synchronization) \
            -k 'not faster'
        wait $runs # alone: without a name it would wait for tee
    else
        checks numbers 200 $(files attention nonfinite)
    fi
fi
if [ "$parts" != contact ]; then
    if [ -n "$quick" ]; then
        part "bench tiny" 200 "$python" -m bench.gpu --quick --sizes tiny --only forge --json "$out/bench.jsonl"
        part run 200 "$python" tools/gpu_run.py "$out/run.json" --quick --seconds 190
    else # alone on the GPU; goals first, and last what can be done without
        checks machine 20 $(files machine)
        bench 1.1B,7B/8 105
        part run 90 "$python" tools/gpu_run.py "$out/run.json" --seconds 70
        checks speed 75 $(files async_save memory_peak compile float8 loss documents loader) \
            -k 'stall or pinned or peak or fits or faster or few or kernels or speed or wait'
        bench 124M 55
        bench 7B/8 35 --only forge,forge-fp8
        bench 2.8B,13B/32 90
    fi
fi
echo "== end, $((end - $(now))) s were left; failed or left out: $(sort -u "$failed" | paste -sd, | sed 's/^$/none/')"
[ ! -s "$failed" ]
