"""What the compiler makes of a build: from tests/builds where it is known, compiled else (see kept_builds.py).

What a test reads from the code it reads by a function with `@reading`, whose answer is kept too:

    @reading
    def stores(found: Resources) -> int:
        return found.ptx.count("st.global")

    assert stores(resources(build)) == 4
"""

from __future__ import annotations

import contextlib
import functools
import inspect as python
import io
import pickle
import re
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import kept_builds
import shared
import triton
from kept_builds import hashed

from registry.toolbox import builds, sass
from registry.toolbox.builds import Build, Loop, Resources, compile_build, gpu_target, inspect

Reading = Callable[..., Any]


class Found:
    """A build, of which each answer is kept; `.resources` compiles."""

    def __init__(self, build: Build, arch: Any) -> None:
        self._build, self._arch = build, arch
        self.name = build.kernel.__name__
        options = sorted((name, repr(value)) for name, value in build.options.items())
        goal = gpu_target(arch)
        key = hashed(build.source(arch).hash(), goal, options, _environment())
        self.build = f"{triton.__version__} sm{goal.arch} {self.name} {key}"
        module = build.kernel.__module__.removeprefix("registry.plugins.").removeprefix("bare_")
        self.file = module.split(".")[0]

    @property
    def resources(self) -> Resources:
        return _resources(self)

    def ask(self, read: Reading, *how: Any) -> Any:
        return self.kept(
            " ".join([read.__name__.strip("_"), *map(str, how)]), _hash_of(read), lambda: read(self.resources, *how)
        )

    def kept(self, fact: str, code: str, find: Callable[[], Any]) -> Any:
        """An answer that hangs on this build, and is found by code with this hash."""
        return kept_builds.answer(self.file, self.build, fact, code, find)

    def __hash__(self) -> int:
        return hash(self.build)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Found) and self.build == other.build

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in SCALARS:
            raise AttributeError(name)
        return self._said.get(name, 0)

    @functools.cached_property
    def _said(self) -> dict[str, Any]:
        return self.ask(_scalars)  # type: ignore[no-any-return]

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads  # type: ignore[no-any-return]

    @property
    def setmaxnreg(self) -> tuple[int, ...]:
        """Each number of registers that some warps ask for."""
        return tuple(self._said.get("setmaxnreg", ()))

    @property
    def ptxas_warnings(self) -> tuple[str, ...]:
        return tuple(self._said.get("ptxas_warnings", ()))

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.ask(_counts))

    @property
    def opcodes(self) -> Opcodes:
        return Opcodes(self.ask(_opcodes))

    @functools.cached_property
    def loops(self) -> list[Loop]:
        """Those with products on tensor cores. Of opcodes the ones in OPCODES are counted."""
        return [Loop(at, n, Opcodes(counts), tuple(spills), inner) for at, n, counts, spills, inner in self.ask(_loops)]


SCALARS = ("registers", "stack", "spill_stores", "spill_loads", "shared", "threads", "blocks_per_sm")
OPCODES = (
    *("MUFU", "F2FP", "FMUL", "FADD", "FFMA", "FSEL", "SEL", "PRMT", "HGMMA", "HMMA", "IMMA", "QGMMA", "IGMMA"),
    *("LDS", "LDSM", "STS", "F2F", "I2F", "UTMAREDG"),
)


class Opcodes(dict[str, int]):
    """How often each of OPCODES occurs; others were not counted, which is another thing than none."""

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def __contains__(self, name: object) -> bool:
        return bool(self[str(name)])

    def __missing__(self, name: str) -> int:
        if name in (*OPCODES, *sass.TENSOR_CORE):
            return 0
        raise KeyError(f"{name} is not counted: add it to OPCODES in tests/support/compiled.py")


def resources(build: Build, arch: Any = "sm90") -> Found:
    """What is to be known of a build."""
    return Found(build, arch)


def reading(read: Reading) -> Reading:
    """Of a function of Resources, and of words or numbers: the same of what `resources` returns, its answer kept.

    Answers are what JSON can hold: lists, not tuples.
    """

    @functools.wraps(read)
    def asked(found: Found, *how: Any) -> Any:
        return found.ask(read, *how)

    return asked


def _scalars(found: Resources) -> dict[str, Any]:
    values = {name: getattr(found, name) for name in (*SCALARS, "ptxas_warnings")}
    values["setmaxnreg"] = sorted(set(found.setmaxnreg))
    return {name: value for name, value in values.items() if value}


def _counts(found: Resources) -> dict[str, int]:
    return {name: count for name, count in found.counts.items() if count}


def _opcodes(found: Resources) -> dict[str, int]:
    return {name: n for name in OPCODES if (n := found.opcodes.get(name))}


def _loops(found: Resources) -> list[Any]:
    counted = [
        [loop.address, loop.instructions, {name: n for name in OPCODES if (n := loop.counts.get(name))}, loop]
        for loop in found.loops
        if loop.tensor_core
    ]
    return [[*rest, list(loop.spills), loop.innermost] for *rest, loop in counted]


# --- readings that several tests ask for ----------------------------------------------------------------------------

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"(?<![\w.])mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]\.",
    "TMA load": r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global",
    "TMA store": r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta",
    "mbarrier": r"mbarrier\.\w*wait",
}


def _instructions(found: Resources) -> dict[str, int]:
    counted = {name: len(re.findall(pattern, found.ptx)) for name, pattern in INSTRUCTIONS.items()}
    return {name: count for name, count in counted.items() if count}


def instructions(found: Found) -> Counter[str]:
    """What PTX asks for by name, which ptxas cannot do otherwise. Reading the machine code costs as much as compiling:
    that is for what ptxas decides."""
    return Counter(found.ask(_instructions))


def matrix_units(found: Found) -> set[str]:
    """Of the instructions above those that multiply matrices."""
    return {name for name in ("wgmma", "mma", "tcgen05") if instructions(found)[name]}


def loop_spills(found: Found, *, innermost: bool = True) -> list[str]:
    """`registry.toolbox.builds.loop_spills` of what is kept."""
    hot = [loop for loop in found.loops if loop.innermost or not innermost]
    return list(dict.fromkeys(line for loop in hot for line in loop.spills))


def hot_loops(found: Any) -> list[Any]:
    """Those of its loops that multiply and have none inside."""
    return [loop for loop in found.loops if loop.tensor_core and loop.innermost]


@reading
def exponentials_beside(found: Resources) -> list[int]:
    """In each loop that multiplies, how many come between its last two waits: for scores, and for the product."""
    code = [(int(at, 16), step) for at, step in re.findall(r"/\*(\w{4,5})\*/\s+(.*);", found.sass)]
    counted = []
    for loop in hot_loops(found):
        steps = [step for at, step in code if loop.address <= at < loop.address + 16 * loop.instructions]
        *_, scores, product = [i for i, step in enumerate(steps) if "WARPGROUP.DEPBAR" in step]
        counted.append(sum("MUFU.EX2" in step for step in steps[scores:product]))
    return counted


@reading
def mentions(found: Resources, pattern: str) -> int:
    """How often PTX has a text like this regular expression."""
    return len(re.findall(pattern, found.ptx))


@reading
def lent_barriers(found: Resources) -> list[int]:
    """Where, in shared memory, a barrier is set up whose first bytes data are stored to or loaded from, too.

    Data is looked for where its address is spelled: at the beginning of what the allocator gave out.
    """
    sums = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", found.ptx))
    barriers = {sums.get(register) for register in re.findall(r"mbarrier\.init\S* \[(%r\d+)\]", found.ptx)}
    data = re.findall(
        r"(?:ld\.shared|st\.shared|stmatrix|ldmatrix)\S*\s.*?\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]", found.ptx
    )
    return sorted(int(at) for at in barriers & {sums.get(r) if more in ("", "0") else more for r, more in data} if at)


ADDRESS = ("USGXT", "ULOP3 & 0x3fff", "R2UR")
"""What cuts 14 bits out of an address, or brings one from where it was parked."""


@reading
def lost_addresses(build: Resources) -> list[str]:
    """What wgmma reads its operands by that was never an address in shared memory: instructions whose results it is.

    Each address in a descriptor is followed through moves, sums and swaps to what made it, in the order of the text.
    """
    held: dict[int, frozenset[tuple[int, str]]] = {}
    """Uniform register -> what made its value; several things, as long as they are combined by exclusive or."""
    nothing = frozenset({(-1, "nothing")})
    found = set()
    for at, (opcode, operands) in enumerate(re.findall(r"\*/\s+(?:@\S+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", build.sass)):
        registers = [int(number) for number in re.findall(r"\bUR(\d+)\b", operands)]
        values = [held.get(register, nothing) for register in registers[1:]]
        if opcode.startswith("HGMMA"):
            quad, a_is_shared = registers[0], operands.partition(",")[2].lstrip().startswith("gdesc")
            made = [held.get(register, nothing) for register in ((quad, quad + 2) if a_is_shared else (quad + 2,))]
            found |= {made_by for value in made for _, made_by in value or nothing if not made_by.startswith(ADDRESS)}
        elif re.match(r"UR\d", operands):
            swap = opcode.startswith("ULOP3") and ", 0x3c," in operands and len(values) == 2
            ored = opcode.startswith("ULOP3") and ", 0xfc," in operands and len(values) == 1
            made_by = "ULOP3 & 0x3fff" if opcode.startswith("ULOP3") and ", 0x3fff," in operands else opcode
            for i in range(2 if ".64" in opcode or "WIDE" in opcode else 1):
                if swap:
                    value = values[0] ^ values[1]
                elif values and (ored or opcode.startswith(("UMOV", "UIADD3"))):
                    value = held.get(registers[1] + i, nothing)
                else:
                    value = frozenset({(at, made_by)})
                held[registers[0] + i] = value
    return sorted(found)


# --- compiling --------------------------------------------------------------------------------------------------------


@functools.cache
def _hash_of(read: Reading) -> str:
    """Of all code that a reading hangs on: its own, what it names in its module and here, and how builds are read."""
    return hashed(_READING, *sorted(_source(python.unwrap(read), {})))


def _source(read: Any, seen: dict[str, str]) -> list[str]:
    seen[read.__name__] = python.getsource(read)
    for name in _names(read.__code__) - set(seen):
        value = read.__globals__.get(name)
        named = python.unwrap(value) if callable(value) else value
        if python.isfunction(named) and named.__module__ in (read.__module__, __name__):
            _source(named, seen)
        elif name.isupper() and named is not None:
            seen[name] = repr(named)
    return list(seen.values())


def _names(code: types.CodeType) -> set[str]:
    """What code reads by name; not the words of its docstring, which may be names too."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))


_READING = hashed(*map(python.getsource, (sass, builds.inspect, builds.Resources, builds._ptxas)), builds.GROUPS)


def _environment() -> str:
    """Settings of Triton's that change what it compiles."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    ours = {name: value for name, value in get_cache_invalidating_env_vars().items() if value}
    return repr(sorted(ours.items()))


class Code(Resources):
    """Resources whose machine code is turned into text by one process of a session."""

    @functools.cached_property
    def sass(self) -> str:
        question = f"machine code of {hashed(self.ptx, self.registers)}"
        return shared.once(question, lambda: Resources.sass.func(self).encode()).decode()  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _resources(found: Found) -> Resources:
    made = shared.once(found.build, lambda: pickle.dumps(vars(_compiled(found._build, found._arch))))
    return Code(**pickle.loads(made))


def _compiled(build: Build, arch: Any) -> Resources:
    """`inspect(compile_build(build, arch))`, with one run of ptxas instead of two: what it says is kept."""
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = compile_build(build, arch)
    with _ptxas_said(said.getvalue()):
        return inspect(compiled)


@contextlib.contextmanager
def _ptxas_said(log: str) -> Iterator[None]:
    """Spare `inspect` its own run of ptxas, unless the build came from Triton's cache and ptxas has said nothing."""
    run = builds._tool
    if "ptxas info" in log:
        builds._tool = lambda name, *arguments: log if name.startswith("ptxas") else run(name, *arguments)
    try:
        yield
    finally:
        builds._tool = run
