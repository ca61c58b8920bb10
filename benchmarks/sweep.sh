#!/bin/sh
# The sweep that the tables of four ops began with, and the plots, on the GPU of this machine:
#
#   sh benchmarks/sweep.sh OUT [PHASE ...]      phases: attention backward matmul grouped overhead conformance
#                                              (default: all)
#
# Leaves in OUT: attention.jsonl, attention_backward.jsonl, matmul.jsonl, grouped_mm.jsonl (raw results), OP.ARCH.yaml (a
# table of each), call_overhead.json, conformance.json. Stopped anywhere, the same command goes on with the measurements.
# From outside:
#
#   PYTHON  the interpreter [python3]           NAME  what evidence calls the raw results [the name of OUT]
#   ARCH    the tables' architecture [sm90]     LOG   all output goes here; its gist is printed [/tmp/kreg_sweep.log]
#   ATTENTION_GRID, BACKWARD_GRID, MATMUL_GRID, GROUPED_GRID [all, training, all, all]
#   ATTENTION_SECONDS, BACKWARD_SECONDS, MATMUL_SECONDS, GROUPED_SECONDS [560, 110, 200, 200]: seconds of each sweep
#   ROUNDS  turns of each contestant where the time allows [7]
#   OVERHEAD_SECONDS, CONFORMANCE_SECONDS [90, 300]: an end to each of these; JOBS: processes of the latter
#   FA3_LIBRARY, PEER_FLEX (see peers.py): peers in the rounds of attention; they never enter a table
set -u
[ $# -ge 1 ] || { sed -n '2,18s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 1
here=$(cd "$(dirname "$0")" && pwd)
shift
[ $# -ge 1 ] || set -- attention backward matmul grouped overhead conformance
python=${PYTHON:-python3} log=${LOG:-/tmp/kreg_sweep.log} name=${NAME:-$(basename "$out")} arch=${ARCH:-sm90}
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
work=$(mktemp -d) && cd "$work" || exit 1 # not a checkout, where -m would find the sources before the installed package
trap 'rm -rf "$work"' EXIT
worst=0
export COLUMNS=180 PYTHONUNBUFFERED=1

# limit SECONDS COMMAND...: output to the log; SIGTERM ends a sweep in good order, and it still fits what it has
limit() {
    seconds=$1 from=$(($(wc -l <"$log") + 1)) begun=$(date +%s)
    shift
    timeout -k 20 "$seconds" "$@" >>"$log" 2>&1
    code=$?
    [ $code -gt $worst ] && worst=$code
    echo "rc $code in $(($(date +%s) - begun)) s"
    gist() { tail -n "+$from" "$log" | grep -E "$1" | tail -n "$2" | cut -c1-200; }
    gist '^left out|^  not measured to the end|^Traceback|Error' 12
}
tune() { # OP SECONDS OPTIONS...; 25 s of it for starting and fitting
    op=$1 seconds=$2
    shift 2
    budget=$((seconds > 50 ? seconds - 25 : seconds / 2))
    limit "$seconds" "$python" -m registry.cli tune "$op" "$@" --budget "${budget}s" --rounds "${ROUNDS:-7}" --turn 15 \
        --timeout 15s --out "$out/$op.jsonl" --run "$name/$op" --table "$out/$op.$arch.yaml"
    gist '^measured|^stopped|^[0-9]+ rules|^regret|^no table' 5
}
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
: >>"$log"
for phase in "$@"; do
    echo "=== $phase"
    case $phase in
    attention)
        tune attention "${ATTENTION_SECONDS:-560}" --grid "${ATTENTION_GRID:-all}" --skip 'torch_math*' \
            --skip 'torch_efficient*' --plugin "$here/peers.py"
        ;;
    backward)
        tune attention_backward "${BACKWARD_SECONDS:-110}" --grid "${BACKWARD_GRID:-training}" --skip 'torch_math*'
        ;;
    matmul) tune matmul "${MATMUL_SECONDS:-200}" --grid "${MATMUL_GRID:-all}" --max-configs 6 ;;
    grouped)
        tune grouped_mm "${GROUPED_SECONDS:-200}" --grid "${GROUPED_GRID:-all}" --graph --skip torch_loop --max-configs 3
        ;;
    overhead)
        limit "${OVERHEAD_SECONDS:-90}" "$python" "$here/call_overhead.py" --output "$out"
        gist ' us   ' 40
        ;;
    conformance)
        OMP_NUM_THREADS=1 limit "${CONFORMANCE_SECONDS:-300}" "$python" -m registry.testing --target cuda --ops \
            --timeout 60 --jobs "${JOBS:-$((cores > 16 ? 15 : cores > 1 ? cores - 1 : 1))}" --json "$out/conformance.json"
        gist '[0-9]+ cases|^  - ' 40
        ;;
    *) echo "no such phase: $phase" && exit 2 ;;
    esac
done
echo "results: $out   log: $log"
exit $worst
