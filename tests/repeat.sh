#!/usr/bin/env bash
# repeat.sh [RUNS [BUSY]]: runs all Python tests RUNS times (default 10), each with a different seed, which it prints, and
# stops at the first run that fails. BUSY: number of endless loops that keep cores busy meanwhile (default 0).
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
    started=$SECONDS
    if ! make python-test SEED=$seed >"build/repeat-$run.log" 2>&1; then
        tail -n 60 "build/repeat-$run.log"
        echo "run $run, seed $seed, beside ${2:-0} busy loops: failed; full log in build/repeat-$run.log" >&2
        exit 1
    fi
    echo "run $run, seed $seed, beside ${2:-0} busy loops: passed in $((SECONDS - started)) s"
done
