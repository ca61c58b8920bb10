"""`gluon_matmul_ws`: what the warp-specialised Hopper product can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.plugins.gluon_matmul_ws import host
from registry.plugins.gluon_matmul_ws.kernel import INTS, matmul_ws

# Measured facts: see the end of kernel.py. Speed of one tile shape against the fastest, where the chip is full.
_TILES = (
    ("coop", 128, 256, 4, 1.00), ("coop", 128, 192, 4, 1.00), ("coop", 128, 160, 5, 0.96), ("coop", 128, 128, 6, 0.97),
    ("pingpong", 128, 128, 4, 0.96), ("coop", 256, 128, 3, 0.95), ("coop", 128, 64, 6, 0.75),
    ("pingpong", 64, 128, 8, 0.78),
    ("pingpong", 64, 256, 4, 0.93),
)  # fmt: skip
_TILES_8BIT = (("coop", 128, 128, 4, 1.0), ("coop", 128, 64, 6, 0.8), ("pingpong", 64, 128, 6, 0.8))


def config(
    mode: str, m: int, n: int, stages: int, k: int = 64, group: int = 8, split: int = 1, stores: int = 2
) -> dict[str, Any]:
    return {
        "MODE": mode, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "STAGES": stages, "STORES": stores, "GROUP": group,
        "SPLIT": split,
    }  # fmt: skip


def candidates(problem, most: int = 8) -> list[dict[str, Any]]:
    """Every tile worth trying, best first: rounds over the chip (the last one split, where that helps) times the size
    of a tile, weighted by what the shape reaches once the chip is full."""
    size, count = host.item(problem.dtype), problem.target.sm_count or 132
    found = []
    for mode, m, n, stages, speed in _TILES if size == 2 else _TILES_8BIT:
        tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
        for split in (1, 2, 4) if mode == "coop" and n >= 128 and not host.split_n(n)[1] else (1,):
            rounds = -(-tiles // count) if split == 1 else tiles // count + -(-(tiles % count) * split // count) / split
            if split > 1 and (n // split < 64 or tiles < count or rounds >= -(-tiles // count)):
                continue
            cost = rounds * m * n / speed * (1 + 0.02 * (split > 1))
            found.append((cost, config(mode, m, n, stages, 128 // size, 16 if problem.m >= 4096 else 8, split)))
    found.sort(key=lambda pair: pair[0])
    return [entry for _, entry in found[:most]]


def configs(problem) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config) -> Design:
    return Design(
        warp_groups=2, pipeline_stages=config["STAGES"], warp_specialized=True, pipeline_tasks=2, persistent=True,
        tile=(config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]), dsl="gluon",
    )  # fmt: skip


def _rule(problem, config) -> Iterable[Reason]:
    for fact in problem.operands:
        turned = host.turned(fact.shape, fact.strides)
        inner = len(fact.shape) - (2 if turned else 1)
        if fact.base_alignment % 16:
            yield Reason(
                "alignment", "base_alignment", f"{fact.base_alignment} bytes", "multiples of 16 bytes",
                f"call .clone() on {fact.name}: its storage offset breaks the alignment", fact.name,
            )  # fmt: skip
        if fact.shape[inner] > 1 and fact.strides[inner] != 1:
            yield Reason(
                "stride", "unit_inner_stride", fact.strides[-2:], "stride 1 in one matrix dimension",
                f"call .contiguous() on {fact.name}", fact.name,
            )  # fmt: skip
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
        if fact.itemsize == 1 and turned != wanted:
            yield Reason(
                "layout", "layout", problem.layout, "nt: wgmma reads 8-bit operands along K only",
                "store b as [N, K] and pass b.mT" if wanted else "call .contiguous() on a", fact.name,
            )  # fmt: skip
    if config["SPLIT"] > 1 and (config["MODE"] != "coop" or host.split_n(config["BLOCK_N"])[1]):
        yield Reason("config", "SPLIT", config["SPLIT"], "1, except for cooperative tiles of 2^n columns", "SPLIT=1")
    if problem.dtype.startswith("float8") and host.split_n(config["BLOCK_N"])[1]:
        yield Reason("config", "BLOCK_N", config["BLOCK_N"], "a power of two for fp8", "BLOCK_N=128")
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
        problem.dtype, problem.out_dtype, config, a_t=turned["a"], b_t=turned["b"], tma_store=store,
        bias=problem.bias, scaled=bool(problem.scaling), activation=problem.activation or "",
    )  # fmt: skip


def _shared_memory(problem, config) -> int:
    """The ring, the buffers of C, and what the barriers and the hand-over to the warp groups take."""
    ring = config["STAGES"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * host.item(problem.dtype)
    cfg = _switches(problem, config)
    return ring + 2 * cfg.STORES * cfg.GM * cfg.EN * host.item(problem.out_dtype) + 16 * cfg.STAGES + HAND_OVER


HAND_OVER = 256


def _registers(problem, config) -> int:
    """168 a thread at launch, for 288 threads rounded to three warp groups; setmaxnreg only moves them around."""
    return 384 * 168


def builds(problem, config) -> list[Any]:
    """The one kernel that this config launches, for a fresh dense output."""
    from registry.compiling import Build

    cfg = _switches(problem, config)
    block = host.blocks_of(cfg)

    def described(name: str, kind: str) -> str:
        rows, columns = block[name]
        return f"tensordesc<{host.SHORT[kind]}[1, {rows}, {columns}],{host.layout(block[name], kind)!r}>"

    out = f"*{host.SHORT[problem.out_dtype]}"
    scale = "*fp32" if problem.scaling else out
    signature = {
        "a_desc": described("a", problem.dtype), "b0_desc": described("b0", problem.dtype),
        "b1_desc": described("b1", problem.dtype),
        "c_desc": described("c", problem.out_dtype) if cfg.TMA_STORE else described("a", problem.dtype),
        "c_ptr": out, "bias_ptr": out, "sa_ptr": scale, "sb_ptr": scale, **dict.fromkeys(INTS, "i32"),
    }  # fmt: skip
    aligned = dict.fromkeys(("c_ptr", "bias_ptr", "sa_ptr", "sb_ptr"), 16)
    return [Build(matmul_ws, signature, {"cfg": cfg}, aligned, {"num_warps": 4, "launch_pdl": cfg.PDL})]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",), dtypes=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"),
        layouts=("nn", "nt", "tn", "tt"), unit_inner_stride=False, batched=True, bias=True, out=True,
        deterministic=True, out_dtypes=("float16", "bfloat16", "float32", "int32"),
        activations=("relu", "gelu", "silu"), scaling=("scalar", "rowwise"), toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory, registers=_registers, rule=_rule,
    )  # fmt: skip
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
