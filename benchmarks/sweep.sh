#!/bin/sh
# The sweep behind the shipped tables: raw results to OUT/NAME/OP.jsonl, tables to OUT/tables/OP.ARCH.yaml.
#
#   sh benchmarks/sweep.sh OUT NAME ARCH [SECONDS]       e.g.  sh benchmarks/sweep.sh benchmarks/results h200 sm90 450
#
# SECONDS is for measuring, all three ops together; starting adds about 20 s an op. Stopped anywhere, the same command
# goes on. FA3_LIBRARY (see peers.py) adds FlashAttention-3 to the rounds; peers never enter a table.
set -u
out=$1 name=$2 arch=$3 seconds=${4:-450}
here=$(dirname "$0")
tune() {
    op=$1 share=$2
    shift 2
    budget=$((seconds * share / 100))
    timeout -k 10 $((budget + 60)) "${PYTHON:-python3}" -m registry.cli tune "$op" "$@" --budget "${budget}s" --rule-cost 0.05 --rounds 5 \
        --turn 15 --timeout 10s --out "$out/$name/$op.jsonl" --run "$name/$op" --table "$out/tables/$op.$arch.yaml"
}
tune attention 46 --grid "${ATTENTION_GRID:-all}" --skip 'torch_math*' --plugin "$here/peers.py"
tune attention_backward 24 --grid "${BACKWARD_GRID:-paper18+gqa}" --skip 'torch_math*'
tune matmul 30 --grid "${MATMUL_GRID:-all}" --max-configs 6
