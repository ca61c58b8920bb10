"""`gluon_matmul_ws`: what the warp-specialised Hopper product can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.plugins.gluon_matmul_ws import host
from registry.plugins.gluon_matmul_ws.kernel import INTS, matmul_ws

# Measured facts: see the end of kernel.py. Speed of one tile shape against the fastest, where the chip is full.
_TILES = (
    ("coop", 128, 128, 6, 1.00),
    ("coop", 128, 256, 4, 0.99),
    ("coop", 128, 192, 4, 0.97),
    ("coop", 128, 320, 3, 0.95),
    ("pingpong", 128, 128, 4, 0.965),
    ("coop", 256, 128, 3, 0.95),
    ("pingpong", 64, 256, 4, 0.92),
    ("pingpong", 64, 128, 8, 0.82),
    ("coop", 128, 64, 6, 0.80),
)
_TILES_8BIT = (
    ("coop", 128, 192, 4, 1.00),
    ("coop", 128, 128, 4, 0.975),
    ("coop", 128, 64, 6, 0.79),
    ("pingpong", 64, 128, 6, 0.65),
)

_EPILOGUE = {"gelu": 1.5e-4, "silu": 0.3e-4}
"""Microseconds for an element of a tile."""


def config(
    mode: str,
    m: int,
    n: int,
    stages: int,
    k: int = 64,
    group: int = 8,
    split: int = 1,
    split_k: int = 1,
    stores: int = 2,
) -> dict[str, Any]:
    return {
        "MODE": mode,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "STAGES": stages,
        "STORES": stores,
        "GROUP": group,
        "SPLIT": split,
        "SPLIT_K": split_k,
    }


def candidates(problem, most: int = 8) -> list[dict[str, Any]]:
    """Every tile worth trying, best first by `_microseconds`."""
    size, count = host.item(problem.dtype), problem.target.sm_count or 132
    blocks = -(-problem.k * size // 128)
    found = []
    for mode, m, n, stages, speed in _TILES if size > 1 else _TILES_8BIT:
        tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
        for split, split_k in _splits(mode, n, tiles, blocks, count):
            cost = _microseconds(m, n, tiles, blocks, split, split_k, count, speed)
            rounds = -(-tiles // count)
            shown = (
                rounds if mode == "coop" else 2 + rounds / 4
            )  # ping-pong hides most, but the last, by half the warps
            cost += shown * m * n * _EPILOGUE.get(problem.activation, 0.0)
            cost *= 2.0 if m > 64 >= problem.m or n > 64 >= problem.n else 1.0  # a tile that is mostly padding
            found.append((cost, config(mode, m, n, stages, 128 // size, split=split, split_k=split_k)))
    found.sort(key=lambda pair: pair[0])
    return [entry for _, entry in found[:most]]


def _splits(mode: str, n: int, tiles: int, blocks: int, count: int) -> Iterable[tuple[int, int]]:
    """(SPLIT, SPLIT_K): of the columns of the last round, or of K where the tiles do not fill the chip."""
    yield 1, 1
    if mode == "coop":
        rest = tiles % count
        if tiles > count and rest and not host.split_n(n)[1]:
            yield from ((split, 1) for split in (2, 4) if n // split >= 64 and -(-rest * split // count) < split)
        ways = (2, 3, 4, 6, 8, 12, 16, 24, 32)
        yield from ((1, split_k) for split_k in ways if tiles * split_k <= count and split_k * 4 <= blocks)


def _microseconds(m, n, tiles, blocks, split, split_k, count, speed) -> float:
    """A guess at a config's time on an H200: rounds over the chip times the time of a tile at full speed, and for
    split-K what writing, counting and adding up cost."""
    block = m * n * 2.4e-5 / speed
    if split_k > 1:
        return -(-blocks // split_k) * block + 5 + (2 + split_k) * m * n * 1e-4
    whole = -(-tiles // count) if split == 1 else tiles // count
    narrow = m * n // split * 2.4e-5 / (0.965 if n // split >= 128 else 0.7)
    tail = 0 if split == 1 else -(-(tiles % count) * split // count) * narrow * (1.0 if split == 2 else 1.35)
    return blocks * (whole * block + tail)


def configs(problem) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config) -> Design:
    return Design(
        warp_groups=2,
        pipeline_stages=config["STAGES"],
        warp_specialized=True,
        pipeline_tasks=2,
        persistent=True,
        tile=(config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]),
        dsl="gluon",
    )


def _rule(problem, config) -> Iterable[Reason]:
    for fact in problem.operands:
        turned = host.turned(fact.shape, fact.strides)
        inner = len(fact.shape) - (2 if turned else 1)
        if fact.base_alignment % 16:
            yield Reason(
                "alignment",
                "base_alignment",
                f"{fact.base_alignment} bytes",
                "multiples of 16 bytes",
                f"call .clone() on {fact.name}: its storage offset breaks the alignment",
                fact.name,
            )
        if fact.shape[inner] > 1 and fact.strides[inner] != 1:
            yield Reason(
                "stride",
                "unit_inner_stride",
                fact.strides[-2:],
                "stride 1 in one matrix dimension",
                f"call .contiguous() on {fact.name}",
                fact.name,
            )
        for dim, (extent, stride) in enumerate(zip(fact.shape, fact.strides, strict=True)):
            if dim != inner and extent > 1 and stride * fact.itemsize % 16:
                yield Reason(
                    "alignment",
                    "stride_alignment",
                    f"{stride * fact.itemsize} bytes",
                    "multiples of 16 bytes",
                    f"pad {fact.name}: its stride of {stride * fact.itemsize} bytes in dimension {dim} is no "
                    "multiple of 16",
                    fact.name,
                )
        wanted = fact.name == "b"
        if fact.itemsize != 2 and turned != wanted:
            yield Reason(
                "layout",
                "layout",
                problem.layout,
                "nt: wgmma reads 8-bit and 32-bit operands along K only",
                "store b as [N, K] and pass b.mT" if wanted else "call .contiguous() on a",
                fact.name,
            )
    if config["SPLIT"] > 1 and (config["MODE"] != "coop" or host.split_n(config["BLOCK_N"])[1]):
        yield Reason("config", "SPLIT", config["SPLIT"], "1, except for cooperative tiles of 2^n columns", "SPLIT=1")
    if host.split_k(config) > 1 and (config["MODE"] != "coop" or config["SPLIT"] > 1):
        yield Reason("config", "SPLIT_K", host.split_k(config), "1, except for cooperative tiles", "SPLIT_K=1")
    if host.split_k(config) > -(-problem.k // config["BLOCK_K"]):
        yield Reason("config", "SPLIT_K", host.split_k(config), "at most one range for each block of K", "SPLIT_K=1")
    if (
        problem.dtype == "int8"
        and problem.out_dtype == "int32"
        and (problem.scaling or problem.activation not in ("", "relu"))
    ):
        yield Reason(
            "out_dtype", "out_dtype", "int32", "a floating dtype with this epilogue", "out_dtype=torch.bfloat16"
        )
    if problem.dtype != "int8" and problem.out_dtype == "int32":
        yield Reason("out_dtype", "out_dtype", "int32", "int8 operands", "out_dtype=torch.float32")


def _switches(problem, config) -> host.Switches:
    turned = {f.name: host.turned(f.shape, f.strides) for f in problem.operands}
    dense = (problem.batch * problem.m, problem.n)
    store = host.tma_can_store(dense, (problem.n, 1), 16, host.item(problem.out_dtype))
    return host.switches(
        problem.dtype,
        problem.out_dtype,
        config,
        a_t=turned["a"],
        b_t=turned["b"],
        tma_store=store,
        bias=problem.bias,
        scaled=bool(problem.scaling),
        activation=problem.activation or "",
    )


def _shared_memory(problem, config) -> int:
    """The ring, the buffers of C, and what the barriers and the hand-over to the warp groups take."""
    ring = config["STAGES"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * host.item(problem.dtype)
    cfg = _switches(problem, config)
    buffers = 2 * cfg.STORES * cfg.GM * cfg.EN * host.item(problem.out_dtype)
    return ring + buffers + (16 + 8 * cfg.ROUND) * cfg.STAGES + HAND_OVER


HAND_OVER = 256


def _registers(problem, config) -> int:
    """168 a thread at launch, for 288 threads rounded to three warp groups; setmaxnreg only moves them around."""
    return 384 * 168


def builds(problem, config) -> list[Any]:
    """The one kernel that this config launches, for a fresh dense output."""
    from registry.toolbox.builds import Build

    cfg = _switches(problem, config)
    block = host.blocks_of(cfg)

    def described(name: str, kind: str) -> str:
        rows, columns = block[name]
        return f"tensordesc<{host.SHORT[kind]}[1, {rows}, {columns}],{host.layout(block[name], kind)!r}>"

    out = f"*{host.SHORT[problem.out_dtype]}"
    scale = "*fp32" if problem.scaling else out
    signature = {
        "a_desc": described("a", problem.dtype),
        "b0_desc": described("b0", problem.dtype),
        "b1_desc": described("b1", problem.dtype),
        "c_desc": described("c", problem.out_dtype) if cfg.TMA_STORE else described("a", problem.dtype),
        "c_ptr": out,
        "bias_ptr": out,
        "sa_ptr": scale,
        "sb_ptr": scale,
        "part_ptr": ("*i32" if problem.dtype == "int8" else "*fp32") if cfg.SPLIT_K > 1 else out,
        "count_ptr": "*i32" if cfg.SPLIT_K > 1 else out,
        **dict.fromkeys(INTS, "i32"),
    }
    aligned = dict.fromkeys(("c_ptr", "bias_ptr", "sa_ptr", "sb_ptr", "part_ptr", "count_ptr"), 16)
    return [Build(matmul_ws, signature, {"cfg": cfg}, aligned, {"num_warps": 4, "launch_pdl": cfg.PDL})]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        batched=True,
        bias=True,
        out=True,
        deterministic=True,
        out_dtypes=("float16", "bfloat16", "float32", "int32"),
        activations=("relu", "gelu", "silu"),
        scaling=("scalar", "rowwise"),
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        Variant(
            "gluon_matmul_ws",
            op="matmul",
            run=host.matmul,
            requires=requires,
            configs=configs,
            builds=builds,
            prepare=host.prepare,
            design=Design(
                warp_groups=2,
                pipeline_stages=4,
                warp_specialized=True,
                pipeline_tasks=2,
                tile=(128, 256, 64),
                persistent=True,
                dsl="gluon",
            ),
            design_of=design_of,
            summary="TMA producer, two consumer warp groups, overlapped TMA stores",
        )
    ]
