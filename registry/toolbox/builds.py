"""Compile GPU kernels without a GPU and read what the compiler made of them.

A :class:`Build` names one kernel exactly as Triton's JIT would compile it. The same record serves the tests,
``kreg inspect`` and compiling ahead::

    build = Build.of(kernel, {"x": torch.empty(1024, device="meta"), "n": 1024}, constants={"BLOCK": 128})
    found = inspect(compile_build(build, "sm90"))
    print(found.registers, found.spills, found.counts["HGMMA"], found.ptxas_warnings)

Nothing here needs a driver; Triton is imported on first use.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from registry.toolbox.in_flight import touched_in_flight
from registry.toolbox.kernel_keys import settle_keys
from registry.toolbox.sass import SPILLS, Loop, loop_spills, loops, opcodes

__all__ = ["Build", "Loop", "Resources", "compile_build", "gpu_target", "inspect", "loop_spills", "loops", "occupancy"]

# What the columns of Resources.counts add up; the first part of a SASS opcode names the instruction.
GROUPS = {
    **{name: (name,) for name in ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA", "MUFU", "BAR", "SYNCS", *SPILLS)},
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "cp.async": ("LDGSTS",),
    "TMA": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
    "TMA load": ("UTMALDG",),
    "TMA store": ("UTMASTG", "UTMAREDG"),
}
# arch: (threads, blocks, bytes of shared memory) per SM, bytes of it that each block loses to the driver.
LIMITS = {
    75: (1024, 16, 65536, 0),
    80: (2048, 32, 167936, 1024),
    86: (1536, 16, 102400, 1024),
    87: (1536, 16, 167936, 1024),
    89: (1536, 24, 102400, 1024),
    90: (2048, 32, 233472, 1024),
    100: (2048, 32, 233472, 1024),
    103: (2048, 32, 233472, 1024),
    120: (1536, 24, 102400, 1024),
}


def _unwrap(kernel: Any) -> Any:
    """The JIT function under ``autotune`` and ``heuristics`` wrappers."""
    while not hasattr(kernel, "arg_names") or hasattr(kernel, "configs"):
        kernel = kernel.fn
    return kernel


@dataclass(frozen=True)
class Build:
    """One kernel build: a JIT function (Triton or Gluon, told apart by type) and everything that it is specialised on.

    ``signature`` maps runtime parameters to Triton types (``"*bf16"``, ``"i32"``, ``"fp32"``, ``"tensordesc<...>"``); a
    parameter in ``constants`` is ``"constexpr"`` and need not be listed. ``alignment`` maps a pointer or integer
    parameter to the number that divides it (16 is the one that Triton's JIT uses). An integer argument equal to 1 is a
    constant to the JIT: list it so. :meth:`of` derives all of that from an example call.
    """

    kernel: Any
    signature: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    alignment: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        settle_keys()
        object.__setattr__(self, "kernel", _unwrap(self.kernel))
        object.__setattr__(self, "name", self.name or self.kernel.__name__)
        names = self.kernel.arg_names
        given = {**self.signature, **dict.fromkeys(self.constants, "constexpr")}
        unknown = [n for n in (*given, *self.alignment) if n not in names]
        missing = [n for n in names if n not in given]
        if unknown or missing:
            raise ValueError(f"build of {self.name}: unknown parameters {unknown}, missing parameters {missing}")
        object.__setattr__(self, "signature", MappingProxyType({n: given[n] for n in names}))
        for name in ("constants", "alignment", "options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.signature.items()), tuple(self.options.items())))

    @classmethod
    def of(
        cls,
        kernel: Any,
        arguments: Mapping[str, Any],
        *,
        constants: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        arch: Any = "sm90",
        name: str = "",
    ) -> Build:
        """The build that a call with these arguments would compile, found by Triton's own specialisation.

        Tensors may be meta tensors (they count as aligned), and tensor descriptors may be made over meta tensors.
        """
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        fn = _unwrap(kernel)
        binder = create_function_from_signature(fn.signature, fn.params, make_backend(gpu_target(arch)))
        bound, found, _ = binder(**arguments, **(constants or {}))
        if any(isinstance(kind, tuple) for kind, *_ in found):
            raise TypeError(f"build of {fn.__name__}: tuple arguments cannot be described; write the Build by hand")
        kinds = dict(zip(fn.arg_names, (kind for kind, *_ in found), strict=True))
        aligned = {
            n: 16
            for n, (kind, attrs) in zip(fn.arg_names, found, strict=True)
            if kind != "constexpr" and isinstance(attrs, str) and "D" in attrs
        }
        return cls(
            fn,
            {n: k for n, k in kinds.items() if k != "constexpr"},
            {n: bound[n] for n, k in kinds.items() if k == "constexpr"},
            aligned,
            options or {},
            name,
        )

    def source(self, arch: Any = "sm90") -> Any:
        """The ``ASTSource`` or ``GluonASTSource`` that ``triton.compile`` takes; the JIT finds what it compiled to."""
        from triton.compiler import make_backend

        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        # As the JIT does it, by the JIT's own function: its cache key also counts what is empty here.
        found = [
            (kind, self._specialisation(parameter))
            for kind, parameter in zip(self.signature.values(), self.kernel.params, strict=True)
        ]
        bound = {n: self.constants.get(n) for n in self.signature}
        options = dict(self.options)
        _, signature, constants, attributes = self.kernel._pack_args(
            make_backend(gpu_target(arch)), options, bound, found, options
        )
        for name, by in self.alignment.items():
            attributes[self.kernel.arg_names.index(name),] = [["tt.divisibility", by]]
        return Source(self.kernel, signature, constants, attributes)

    def _specialisation(self, parameter: Any) -> Any:
        """What the JIT's specialisation says besides the type: a constant's value, "D" for divisible, "" for not."""
        kind = self.signature[parameter.name]
        if kind == "constexpr":
            return self.constants[parameter.name]
        if parameter.do_not_specialize or not re.match(r"\*|[iu](?!1$)", kind):
            return None
        return "D" if self.alignment.get(parameter.name) == 16 else ""


def gpu_target(arch: Any) -> Any:
    """``"sm90"``, ``"sm_90a"``, ``90``, a registry Target or a ``GPUTarget`` as Triton's ``GPUTarget``."""
    from triton.backends.compiler import GPUTarget

    if isinstance(arch, GPUTarget):
        return arch
    text = str(getattr(arch, "arch", arch))
    match = re.fullmatch(r"(?:sm_?)?(\d+)[af]?", text)
    if not match:
        raise ValueError(f"{text!r} is not an NVIDIA architecture such as 'sm90'")
    return GPUTarget("cuda", int(match.group(1)), 32)


def compile_build(build: Build, arch: Any = "sm90") -> Any:
    """Compile for ``arch`` into Triton's cache and return Triton's ``CompiledKernel``; no GPU or driver is needed."""
    import triton

    return triton.compile(build.source(arch), target=gpu_target(arch), options=dict(build.options))


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes from the machine. Bytes and registers are per thread, ``shared`` per block.

    What is counted in the machine code is found when it is asked for: nvdisasm costs more than most compilations.
    """

    name: str
    arch: int
    registers: int  # at launch; warp groups change their own with setmaxnreg
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    threads: int
    blocks_per_sm: int
    occupancy: float
    setmaxnreg: tuple[int, ...]
    ptxas_warnings: tuple[str, ...]
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)

    @property
    def spills(self) -> int:
        """Bytes of spill stores and loads that ptxas reports for the whole kernel."""
        return self.spill_stores + self.spill_loads

    @functools.cached_property
    def sass(self) -> str:
        """The machine code as text."""
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(self.cubin)
            return _tool("nvdisasm", "-c", cubin)

    @functools.cached_property
    def opcodes(self) -> Counter[str]:
        """How often each instruction occurs."""
        return opcodes(self.sass)

    @functools.cached_property
    def counts(self) -> Mapping[str, int]:
        """The same by the names of GROUPS."""
        return {group: sum(self.opcodes[name] for name in names) for group, names in GROUPS.items()}

    @property
    def loops(self) -> list[Loop]:
        return loops(self.sass)

    @functools.cached_property
    def touched_in_flight(self) -> list[str]:
        """Instructions that touch what products in flight write or read, before anybody waited: see `in_flight`."""
        return touched_in_flight(self.sass) if "wgmma.mma_async" in self.ptx else []

    @functools.cached_property
    def lent_barriers(self) -> list[int]:
        """Bytes of shared memory where a barrier is set up, and data lie later: see `toolbox.hopper`. Seen where their
        address is spelled, at the beginning of what the allocator gave out."""
        sums = {found[1]: found[2] for found in _SUM.finditer(self.ptx)}
        barriers: dict[str | None, int] = {}
        for found in _BARRIER.finditer(self.ptx):
            barriers.setdefault(sums.get(found[1]), found.start())
        lent = set()
        for found in _DATA.finditer(self.ptx):
            at = found[2] if found[2] not in (None, "0") else sums.get(found[1])
            if at is not None and barriers.get(at, len(self.ptx)) < found.start():
                lent.add(int(at))
        return sorted(lent)


_SUM = re.compile(r"add\.s32\s+(%r\d+), %r\d+, (\d+);")
_BARRIER = re.compile(r"mbarrier\.init\S* \[(%r\d+)\]")
_DATA = re.compile(
    r"(?:ld\.shared|st\.shared|stmatrix|ldmatrix)\S*\s.*?\[\s*(%r\d+|global_smem)\s*(?:\+\s*(\d+))?\s*\]"
)
_WARNING = re.compile(r"warning|\bC7\d{3}\b|serializ", re.IGNORECASE)


def inspect(compiled: Any, *, warnings: bool = True) -> Resources:
    """Read a ``CompiledKernel``. ``warnings=False`` skips the second ptxas run: no warnings, and spill sizes read 0."""
    arch, ptx, meta = compiled.metadata.target.arch, compiled.asm["ptx"], compiled.metadata
    with tempfile.TemporaryDirectory() as folder:
        cubin, text = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        text.write_text(ptx)
        usage = _tool("cuobjdump", "-res-usage", cubin)
        log = _tool(*_ptxas(meta), text, "-o", os.devnull) if warnings else ""
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = dict(re.findall(r"(REG|STACK):(\d+)", usage.split(meta.name, 1)[-1]))
    threads, registers = meta.num_warps * 32, int(used["REG"])
    blocks, share = occupancy(arch, threads, registers, meta.shared)
    return Resources(
        name=meta.name,
        arch=arch,
        registers=registers,
        stack=int(used["STACK"]),
        shared=meta.shared,
        threads=threads,
        spill_stores=int(spilled[1]) if spilled else 0,
        spill_loads=int(spilled[2]) if spilled else 0,
        blocks_per_sm=blocks,
        occupancy=share,
        setmaxnreg=tuple(int(n) for n in re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx)),
        ptxas_warnings=tuple(line.strip() for line in log.splitlines() if _WARNING.search(line)),
        ptx=ptx,
        cubin=compiled.asm["cubin"],
    )


def occupancy(arch: Any, threads: int, registers: int, shared: int) -> tuple[int, float]:
    """Blocks that fit on one SM, and the share of its warps they fill; an unknown arch counts as the next older one."""
    number = gpu_target(arch).arch
    most, blocks, memory, reserved = LIMITS[max((n for n in LIMITS if n <= number), default=75)]
    warps = -(-threads // 32)
    fit = [blocks, most // (warps * 32), memory // (shared + reserved) if shared + reserved else blocks]
    if registers:
        fit.append(65536 // (-(-registers * 32 // 256) * 256) // warps)
    return min(fit), min(fit) * warps * 32 / most


def _tool(name: str, *arguments: Any) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout + done.stderr


def _ptxas(meta: Any) -> list[str]:
    """The ptxas command that Triton used for this kernel, as far as it changes the machine code."""
    import inspect as python

    from triton.backends.nvidia import compiler

    body = python.getsource(compiler.CUDABackend.make_cubin)
    flags = re.findall(r"'(--regAllocOptLevel=\d+)'", body)
    flags += [] if getattr(meta, "enable_fp_fusion", True) else ["--fmad=false"]
    flags += (getattr(meta, "ptx_options", None) or "").split()
    name = os.path.basename(compiler.get_ptxas(meta.target.arch).path)
    return [
        name if name.startswith("ptxas") else "ptxas",
        "-v",
        *flags,
        f"--gpu-name={compiler.sm_arch_from_capability(meta.target.arch)}",
    ]
