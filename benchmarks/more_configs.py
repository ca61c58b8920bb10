"""Our kernels with configs beyond those that they ship, to be timed beside them and never dispatched to.

    kreg tune matmul --shapes benchmarks/shapes/matmul.txt --graph --plugin benchmarks/more_configs.py

peer.more_*        the matmuls, with every tile worth trying
peer.warp_groups   gluon_fa3 at head dim 64 by two and by three consumer warp groups, each with what suits it best:
                   three groups of 64 rows have 160 registers each, two have 240 and use theirs for a part of Q
"""

from __future__ import annotations

import dataclasses

import torch

from registry import variants
from registry.plugins import gluon_matmul_ws, triton_matmul

FEW_ROWS = (  # BLOCK_M, BLOCK_N, BLOCK_K in 16-bit elements, warps, stages
    *((16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 64, 4, 4), (16, 64, 256, 4, 3), (16, 128, 128, 4, 4)),
    *((16, 256, 64, 8, 4), (32, 64, 128, 4, 4), (64, 64, 128, 4, 4), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4)),
    (128, 128, 64, 8, 4),
)


def few_rows(problem):
    """triton_matmul where memory decides: tiles about as high as the problem, K split or not."""
    item, found = getattr(torch, problem.dtype).itemsize, []
    for rows, columns, depth, warps, stages in FEW_ROWS if problem.m <= 128 else ():
        if rows // 2 < problem.m <= 4 * rows or rows == 16 >= problem.m:
            split = triton_matmul.split_of(problem, rows, columns, depth * 2 // item)
            for ways in sorted({1, split, 2 * split}):
                found.append(triton_matmul.config_of(rows, columns, depth * 2 // item, warps, stages, split=ways))
    return found


def warp_groups(problem):
    shared = {"BLOCK_N": 128, "stages": 2, "schedule": "dynamic"}
    two = {"consumers": 2, "pingpong": "off", "q_columns": 64, "rescale": "after_pv", "overlap": True}
    three = {"consumers": 3, "pingpong": "pair", "q_columns": 0, "rescale": "after_pv", "overlap": True}
    if problem.causal:  # a tile of 192 rows and key blocks of 128 cannot overlap
        three |= {"rescale": "before_pv", "overlap": False}
    return [shared | two, shared | three] if problem.head_dim == 64 else []


def registry_variants():
    made = {
        "peer.more_gluon_matmul_ws": ("gluon_matmul_ws", gluon_matmul_ws.candidates),
        "peer.more_triton_matmul": ("triton_matmul", few_rows),
        "peer.warp_groups": ("gluon_fa3", warp_groups),
    }
    known = variants()
    return [dataclasses.replace(known[base], name=name, configs=configs) for name, (base, configs) in made.items()]
