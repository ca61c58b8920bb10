"""What the compiler makes of a build, found once however many tests, processes and sessions ask."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shared
import triton

from registry.toolbox import builds
from registry.toolbox.builds import Build, Resources, compile_build, gpu_target, inspect

INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"(?<![\w.])mma\.sync",
    "tcgen05": r"tcgen05\.mma",
    "cp.async": r"cp\.async\.c[ag]\.",
    "TMA load": r"cp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global",
    "TMA store": r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta",
    "mbarrier": r"mbarrier\.\w*wait",
}


def instructions(ptx: str) -> Counter[str]:
    """What PTX asks for by name, which ptxas cannot do otherwise. Reading the machine code costs as much as compiling:
    that is for what ptxas decides."""
    return Counter({name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()})


def matrix_units(found: Resources) -> set[str]:
    """Of the instructions above those that multiply matrices."""
    return {name for name in ("wgmma", "mma", "tcgen05") if instructions(found.ptx)[name]}


_kept: dict[str, Resources] = {}
"""This process's answers, with the machine code as text where a test has asked for it."""
_READING = hashlib.sha256(b"".join(Path(str(file)).read_bytes() for file in (__file__, builds.__file__))).hexdigest()
"""How answers are found: those found in another way do not count."""


class Kept(Resources):
    """Resources whose machine code as text is kept too."""

    @functools.cached_property
    def sass(self) -> str:
        question = f"{_READING} {triton.__version__} {hashlib.sha256(self.cubin).hexdigest()}"
        return shared.kept(question, lambda: Resources.sass.func(self).encode()).decode()


def resources(build: Build, arch: Any = "sm90") -> Resources:
    """`inspect(compile_build(build, arch))`, with one run of ptxas instead of two: what it says is kept."""
    options = sorted((name, repr(value)) for name, value in build.options.items())
    question = f"{_READING} {triton.__version__} {build.source(arch).hash()} {gpu_target(arch)} {options}"
    if question not in _kept:
        fields = pickle.loads(shared.kept(question, lambda: pickle.dumps(vars(_resources(build, arch)))))
        _kept[question] = Kept(**fields)
    return _kept[question]


def _resources(build: Build, arch: Any) -> Resources:
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


ADDRESS = ("USGXT", "ULOP3 & 0x3fff", "R2UR")
"""What cuts 14 bits out of an address, or brings one from where it was parked."""


def lost_addresses(sass: str) -> set[str]:
    """What wgmma reads its operands by that was never an address in shared memory: instructions whose results it is.

    Each address in a descriptor is followed through moves, sums and swaps to what made it, in the order of the text.
    """
    held: dict[int, frozenset[tuple[int, str]]] = {}
    """Uniform register -> what made its value; several things, as long as they are combined by exclusive or."""
    nothing = frozenset({(-1, "nothing")})
    found = set()
    for at, (opcode, operands) in enumerate(re.findall(r"\*/\s+(?:@\S+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;", sass)):
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
    return found
