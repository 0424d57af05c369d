#!/usr/bin/env bash
# repeat.sh [RUNS [BUSY]]: runs all Python tests RUNS times (default 10), each with a seed of its own, which it prints, and
# stops at the first run that fails. BUSY: how many endless loops take the cores meanwhile (default 0).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

loops=()
trap '((${#loops[@]} == 0)) || kill "${loops[@]}"' EXIT
for ((i = 0; i < ${2:-0}; i++)); do
    (while :; do :; done) &
    loops+=($!)
done
mkdir -p build
for ((run = 1; run <= ${1:-10}; run++)); do
    seed=$((RANDOM * 32768 + RANDOM))
    began=$SECONDS
    if ! make python-test SEED=$seed >"build/repeat-$run.log" 2>&1; then
        tail -n 60 "build/repeat-$run.log"
        echo "run $run, seed $seed, beside ${2:-0} busy loops: failed; build/repeat-$run.log has all of it" >&2
        exit 1
    fi
    echo "run $run, seed $seed, beside ${2:-0} busy loops: passed in $((SECONDS - began)) s"
done
