"""What Triton's automatic warp specialization makes of a loop, read from the code it compiles to. No GPU is needed.

    python tests/support/autows_forms.py            # what this Triton does to each form
    python tests/support/autows_forms.py --write    # and docs/autows.md anew

The forms are those which plugins/triton_autows.py takes, and those which it has to avoid.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from compiled import resources
from kept_builds import hashed
from triton.tools.tensor_descriptor import TensorDescriptor

from registry import Target, variants
from registry.ops.attention.problem import AttentionProblem
from registry.toolbox.builds import Build, compile_build, inspect
from registry.toolbox.launch import StandIn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "autows.md"
SPECIALIZED, UNSPECIALIZED, FAILS = "specialized", "not specialized", "does not compile"
TWICE, WRONG = "both consumers do all the work", "wrong rows"
LENGTH, HEAD_DIM = 1024, 64
TRITON_ISSUES = "https://github.com/triton-lang/triton"


# --- loops that the plugin has to avoid, as small as they can be --------------------------------------------------


@triton.jit
def _step(n, q_MD, k, v, rows_M, acc_MD, sum_M, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    scores_MN = tl.dot(q_MD, k.load([n, 0]).T)
    if MASKED:
        scores_MN = tl.where((n + tl.arange(0, BLOCK_N))[None, :] <= rows_M[:, None], scores_MN, float("-inf"))
    p_MN = tl.exp2(scores_MN)
    v_ND = v.load([n, 0])
    return tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD), sum_M + tl.sum(p_MN, 1)


@triton.jit
def small(
    q,
    k,
    v,
    out,
    sums,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOST: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    ROW_NUMBERS: tl.constexpr,
):
    first_row = tl.program_id(0) * BLOCK_M
    if not HOST:
        q = tl.make_tensor_descriptor(q, [length, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, HEAD_DIM])
        k = tl.make_tensor_descriptor(k, [length, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM])
        v = tl.make_tensor_descriptor(v, [length, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_N, HEAD_DIM])
        out = tl.make_tensor_descriptor(out, [length, HEAD_DIM], [HEAD_DIM, 1], [BLOCK_M, HEAD_DIM])
    rows_M = first_row + tl.arange(0, BLOCK_M)
    q_MD = q.load([first_row, 0])
    acc_MD = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    end = length
    if TWO_LOOPS:
        end = first_row
    for n in tl.range(0, end, BLOCK_N, warp_specialize=True):
        acc_MD, sum_M = _step(n, q_MD, k, v, rows_M, acc_MD, sum_M, False, BLOCK_N)
    if TWO_LOOPS:
        for n in tl.range(end, end + BLOCK_M, BLOCK_N, warp_specialize=True):
            acc_MD, sum_M = _step(n, q_MD, k, v, rows_M, acc_MD, sum_M, True, BLOCK_N)
    out.store([first_row, 0], (acc_MD / sum_M[:, None]).to(tl.bfloat16))
    if ROW_NUMBERS:
        tl.store(sums + rows_M, sum_M)


def _small(host: bool = False, two_loops: bool = False, row_numbers: bool = False, block_m: int = 128) -> Build:
    names = {"q": block_m, "k": 128, "v": 128, "out": block_m}
    memory = torch.empty(LENGTH, HEAD_DIM, dtype=torch.bfloat16, device="meta")
    tiles: dict[str, Any] = {
        name: TensorDescriptor.from_tensor(memory, [rows, HEAD_DIM])
        if host
        else StandIn(memory.shape, memory.dtype, memory.stride())
        for name, rows in names.items()
    }
    arguments = {**tiles, "sums": StandIn((LENGTH,), torch.float32), "length": LENGTH}
    constants = dict(
        HEAD_DIM=HEAD_DIM, BLOCK_M=block_m, BLOCK_N=128, HOST=host, TWO_LOOPS=two_loops, ROW_NUMBERS=row_numbers
    )
    return Build.of(small, arguments, constants=constants, options={"num_warps": 4, "num_stages": 2})


# --- the plugin's own kernel --------------------------------------------------------------------------------------


def problem(device: str = "H200", **sizes: Any) -> AttentionProblem:
    return AttentionProblem.of_shape(Target.named(device), **{"hq": 2, "s": LENGTH, "d": HEAD_DIM, **sizes})


def _plugin(arch: str = "sm90", num_warps: int = 4, number: int = 0, **sizes: Any) -> Build:
    """What a problem would compile, whether or not an erratum refuses it."""
    variant, p = variants()["triton_autows"], problem(**sizes)
    fits = [c for c in variant.configs if variant.requires.shared_memory(p, c) <= p.target.shared_memory]
    (build,) = variant.builds(p, fits[number])
    return Build(
        build.kernel, build.signature, build.constants, build.alignment, {**build.options, "num_warps": num_warps}
    )


# --- what came of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One way to write the loop, or one problem for it, and what Triton is known to do to it."""

    title: str
    build: Callable[[], Build]
    known: str
    link: str = ""
    """Where the fault is reported, if publicly."""
    arch: str = "sm90"


@dataclass(frozen=True)
class Outcome:
    """What the compiler did."""

    verdict: str
    threads: int = 0
    setmaxnreg: tuple[int, ...] = ()


LEGAL: dict[str, dict[str, Any]] = {
    "full attention": {},
    "causal": dict(causal=True),
    "window": dict(window=(64, 64)),
    "softcap": dict(softcap=10.0),
    "log-sum-exp": dict(lse=True),
    "ragged lengths": dict(s=1000),
    "one row": dict(s=1, sk=LENGTH, causal=True),
    "grouped heads": dict(hq=8, hkv=2),
    "all of them": dict(causal=True, window=(64, 0), softcap=5.0, lse=True, s=1000),
    "head dim 72": dict(d=72, lse=True),
    "head dim 128": dict(d=128, causal=True, lse=True),
    "head dim 256": dict(d=256, causal=True, lse=True),
    "128 with v of 64": dict(d=128, dv=64),
    "fp16": dict(dtype="float16"),
}
"""Problems that the plugin takes."""
ILLEGAL: dict[str, dict[str, Any]] = {"float32 (tf32)": dict(dtype="float32")}
"""Problems that it claims and an erratum refuses."""

_FORMS = [
    *(Form(title, functools.partial(_plugin, **sizes), SPECIALIZED) for title, sizes in LEGAL.items()),
    *(
        Form(title, functools.partial(_plugin, **sizes), FAILS, f"{TRITON_ISSUES}/pull/11796")
        for title, sizes in ILLEGAL.items()
    ),
    Form("`num_warps=8`", functools.partial(_plugin, num_warps=8), UNSPECIALIZED),
    Form(
        "a masked loop after the unmasked one",
        functools.partial(_small, two_loops=True),
        FAILS,
        f"{TRITON_ISSUES}/issues/9728",
    ),
    Form("descriptors made on the host", functools.partial(_small, host=True), FAILS, f"{TRITON_ISSUES}/issues/11587"),
    Form("tiles of 64 rows", functools.partial(_small, block_m=64), TWICE, f"{TRITON_ISSUES}/pull/10436"),
    Form("row numbers made from a descriptor's row", functools.partial(_small, row_numbers=True), WRONG, "#rows"),
    Form("an A100", _plugin, UNSPECIALIZED, f"{TRITON_ISSUES}/pull/7108", arch="sm80"),
    Form("an RTX 5090", _plugin, UNSPECIALIZED, arch="sm120"),
]
FORMS = {form.title: form for form in _FORMS}


def compile_here(title: str) -> Outcome:
    """Compile a form in this process, which a failing compiler may end."""
    form = FORMS[title]
    try:
        compiled = compile_build(form.build(), form.arch)
        found = inspect(compiled)
    except Exception:
        return Outcome(FAILS)
    registers = tuple(sorted(set(found.setmaxnreg)))
    ignored = any("setmaxnreg' ignored" in warning for warning in found.ptxas_warnings)
    if ignored or found.threads != 384 or "wgmma.mma_async" not in found.ptx or not {40, 232} <= set(registers):
        return Outcome(UNSPECIALIZED, found.threads, () if ignored else registers)
    verdict = verdict_of_split(compiled.asm["ttgir"], form.build().constants["BLOCK_M"])
    return Outcome(verdict, found.threads, registers)


def verdict_of_split(ttgir: str, rows: int) -> str:
    """Whether each consumer has its own rows, and counts them right.

    The second consumer stores its half from `first_row + 64`. Nothing but copies may use that value: a vector of row
    numbers has been cut into halves of its own, the second of which already begins at 64.
    """
    consumers = re.findall(r"^ +partition\d+\(.*?ttg\.warp_return", ttgir, re.M | re.S)
    store = re.compile(r"async_tma_copy_local_to_global %\w+\[(%\w+), %\w+\] .*!ttg\.memdesc<(\d+)x")
    stores = [found for text in consumers if (found := store.search(text))]
    if len(stores) != 2 or any(int(found[2]) * 2 != rows for found in stores):
        return TWICE
    for text, found in zip(consumers, stores, strict=True):
        row = re.escape(found[1])
        moved = re.search(rf"{row} = arith\.addi ", text)
        uses = [line for line in text.splitlines() if re.search(rf"{row}(?!\w)", line)]
        if moved and any("async_tma" not in line and "= arith.addi" not in line for line in uses):
            return WRONG
    return SPECIALIZED


@functools.cache
def outcome(title: str) -> Outcome:
    """What comes of a form; several tests ask about each."""
    form, reading = FORMS[title], hashed(Path(__file__).read_bytes())
    found = resources(form.build(), form.arch).kept("outcome", reading, lambda: vars(_outcome(title)))
    return Outcome(found["verdict"], found["threads"], tuple(found["setmaxnreg"]))


def _outcome(title: str) -> Outcome:
    """In a copy of this process where the compiler may end it."""
    if FORMS[title].known != FAILS:
        return compile_here(title)
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    child = forking.Process(target=lambda: writing.send(compile_here(title)))
    child.start()
    writing.close()
    try:
        return reading.recv()  # type: ignore[no-any-return]
    except EOFError:
        return Outcome(FAILS)
    finally:
        child.join()


# --- the page -----------------------------------------------------------------------------------------------------


def forms_table() -> str:
    """Markdown: every form and what came of it."""
    rows = ["| form | outcome | threads | `setmaxnreg` | report |", "| --- | --- | --: | --- | --- |"]
    for title, form in FORMS.items():
        found = outcome(title)
        report = f"[here]({form.link})" if form.link.startswith("#") else f"<{form.link}>" if form.link else ""
        registers = ", ".join(map(str, found.setmaxnreg))
        rows.append(f"| {form.title} | {found.verdict} | {found.threads or ''} | {registers} | {report} |")
    return "\n".join(rows)


def speeds_table() -> str:
    """Markdown: the measured shapes of docs/measured/attention.md that the plugin ran, beside its two neighbours."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import plots

    names = ("triton_autows", "triton_fa2", "gluon_fa3")
    results = plots.read_results(ROOT / "benchmarks" / "results")
    rows = [f"| shape | {' | '.join(f'`{name}`' for name in names)} |", "|---|--:|--:|--:|"]
    for case in plots._table_cases(plots.gathered(results, "attention"), "attention"):
        found = plots.speeds(case)
        if all(name in found for name in names):
            rows.append(f"| {case.text.replace(',', ', ')} | {' | '.join(f'{found[name]:.0f}' for name in names)} |")
    return f"{plots.device_line(results, 'attention')}. TFLOPS, best config of each.\n\n" + "\n".join(rows)


def filled(text: str, name: str, content: str) -> str:
    """The page with one generated part made anew."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert pattern.search(text), f"no place for {name}"
    return pattern.sub(lambda place: f"{place[1]}\n{content}\n\n{place[2]}", text)


def with_forms(text: str) -> str:
    """docs/autows.md as this Triton would have it."""
    return filled(text, "forms", f"Triton {triton.__version__}, each form compiled without a GPU:\n\n{forms_table()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/autows.md anew")
    given = parser.parse_args()
    print(forms_table())
    if given.write:
        text = filled(PAGE.read_text(encoding="utf-8"), "speeds", speeds_table())
        PAGE.write_text(with_forms(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
