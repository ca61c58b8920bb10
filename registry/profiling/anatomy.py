"""Roles and shared memory of a compiled kernel: who has which warps and registers, which buffer lies where.

Read from the module that Triton keeps, after the compiler's own passes have placed everything; needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from registry.toolbox.builds import gpu_target

WARPS_OF_GROUP = 4
_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "f8E4M3FN": 1, "f8E5M2": 1}


@dataclass(frozen=True)
class Role:
    """Warps that run one stretch of code."""

    number: int
    """0 is the kernel's own partition, those after it as the kernel lists them."""
    first_warp: int
    warps: int
    registers: int | None
    """Per thread, as setmaxnreg leaves it; None where the compiler gave all warps the same."""
    multiplies: bool = False
    """Whether it issues matrix products."""
    sends: bool = False
    """Whether it takes tiles from shared memory to memory, or adds them to sums there."""


@dataclass
class Buffer:
    """One allocation in shared memory."""

    name: str
    kind: str
    """What is in it: "tiles", "barriers" or "scratch" (the compiler's own)."""
    shape: str
    offset: int
    bytes: int
    writers: set[int] = field(default_factory=set)
    """Roles that write to it; -1 is the code before the roles part."""
    readers: set[int] = field(default_factory=set)
    waiters: set[int] = field(default_factory=set)
    """Roles that wait at the barriers in it."""
    arrivals: int = 0
    """How many complete a phase of its barriers; 0 where it holds none."""

    @property
    def lives(self) -> str:
        """When its bytes are its own."""
        users = self.writers | self.readers | self.waiters
        if not users:
            return "never used"
        return "while the roles run" if max(users) >= 0 else "before the roles part"


@dataclass(frozen=True)
class CodeStep:
    """One thing that a role's code does to a buffer, or a mark beside it; in the order of the code."""

    role: int
    what: str
    """"enter" or "leave" a span; "fill" (by a bulk copy), "write" or "read" tiles; "wait" or "arrive" at barriers."""
    name: str
    """Of the span or the buffer."""
    announced: str = ""
    """Of a fill: the barriers that say when it is there."""


@dataclass(frozen=True)
class Anatomy:
    """What one kernel holds."""

    kernel: str
    warps: int
    roles: tuple[Role, ...]
    buffers: tuple[Buffer, ...]
    shared: int
    """Bytes of shared memory of a block, the compiler's own use included."""
    steps: tuple[CodeStep, ...] = ()
    """Where the module has marks."""


def anatomy_of(compiled: Any, arch: int) -> Anatomy:
    """The anatomy of a `CompiledKernel`."""
    return read(placed(compiled.asm["ttgir"], arch), compiled.metadata.name)


def steps_of(build: Any, target: Any) -> tuple[CodeStep, ...]:
    """What the code of a build does between its marks; compiled anew as far as that takes, with its marks in it."""
    import triton.profiler  # noqa: F401  (marks are put in where it is imported and its flag is set)
    from triton.compiler import make_backend
    from triton.profiler.flags import flags

    goal, source = gpu_target(target), build.source(target)
    backend = make_backend(goal)
    options = backend.parse_options({**build.options, **source.parse_options()})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = _context(backend)
    before, flags.instrumentation_on = flags.instrumentation_on, True
    try:
        made = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(goal, options, *made, context)
        for name in list(stages)[list(stages).index(source.ext) :]:
            module = stages[name](module, {**options.__dict__, "target": goal})
            if name == "ttgir":
                break
    finally:
        flags.instrumentation_on = before
    return read(placed(str(module), goal.arch), build.name).steps


def _context(backend: Any = None) -> Any:
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    (backend or nvidia).load_dialects(context)
    with contextlib.suppress(ImportError):  # a triton without its profiler has no marks either
        from triton._C.libtriton import proton

        proton.load_dialects(context)
    return context


def placed(ttgir: str, arch: int) -> str:
    """The module with warps and shared memory assigned, by the passes that Triton itself would run next."""
    from triton._C.libtriton import ir, nvidia, passes

    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ttgir")
        path.write_text(ttgir, encoding="utf-8")
        module = ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, arch, 87)
    try:
        manager.run(module, "plan")
    except TypeError:  # without a name, in older tritons
        manager.run(module)
    return str(module)


_ALLOC = re.compile(
    r"%(?P<name>[\w#]+) = ttg\.local_alloc\b.*?allocation\.offset = (?P<offset>\d+) : i32"
    r".*?->\s*!ttg\.memdesc<(?P<type>[^,]+),"
)
_SCRATCH = re.compile(r"(?P<op>tt[gn]*\.[\w.]+|\"tt\.reduce\").*?allocation\.offset = (?P<offset>\d+) : i32")
_OWN_USE = {"tt.func": "what roles are handed", "ttg.warp_specialize": "what roles are handed"}
_VIEW = re.compile(r"%(?P<name>[\w#]+) = ttg\.memdesc_\w+ %(?P<of>[\w#]+)")
_NAMES = re.compile(r"%([\w#]+)")
_PARTITION = re.compile(r"^\s*partition(\d+)\((.*)\) num_warps\((\d+)\)")
_WRITES = ("ttg.local_store", "async_tma_copy_global_to_local", "async_tma_gather")
_SENDS = ("async_tma_reduce", "copy_local_to_global")
_PRODUCTS = ("warp_group_dot %", "tt.dot ", "tc_gen5_mma")
_MARK = re.compile(r"proton\.record (start|end) \"([^\"]*)\"")
_ARRIVALS = re.compile(r"ttng\.init_barrier %[\w#]+, (\d+)")
_WAITS, _BARRIERS = "wait_barrier", ("arrive_barrier", "barrier_expect", "init_barrier")


def read(text: str, kernel: str) -> Anatomy:
    """The anatomy in the text of a placed module."""
    starts = _numbers(text, "warpGroupStartIds")
    registers = _numbers(text, "actualRegisters")
    total = re.search(r"\"ttg\.total-num-warps\" = (\d+)", text)
    first = re.search(r"\"ttg\.num-warps\" = (\d+)", text)
    warps = int(first[1]) if first else WARPS_OF_GROUP
    roles = [Role(0, 0, warps, registers[0] if registers else None)]
    buffers: dict[str, Buffer] = {}
    views: dict[str, str] = {}
    captured: list[str] = []
    multiply: set[int] = set()
    send: set[int] = set()
    steps: list[CodeStep] = []
    role = -1
    for line in text.splitlines():
        found = _PARTITION.match(line)
        if found:
            role = int(found[1]) + 1
            mine = registers[role] if role < len(registers) else None
            if role <= len(starts) and "warp_return" not in line:
                roles.append(Role(role, starts[role - 1], int(found[3]), mine))
            arguments = _NAMES.findall(found[2])
            views |= dict(zip(arguments, captured, strict=False))
            continue
        if "ttg.warp_specialize(" in line:
            captured = [views.get(name, name) for name in _NAMES.findall(line.partition(")")[0])]
        elif re.match(r"\s*default \{", line):
            role = 0
        if any(word in line for word in _PRODUCTS):
            multiply.add(max(role, 0))
        if any(word in line for word in _SENDS):
            send.add(max(role, 0))
        if mark := _MARK.search(line):
            steps.append(CodeStep(role, "enter" if mark[1] == "start" else "leave", mark[2]))
            continue
        _take(line, role, buffers, views, steps)
    roles = [dataclasses.replace(r, multiplies=r.number in multiply, sends=r.number in send) for r in roles]
    shared = re.search(r"ttg\.shared = (\d+)", text)
    used = sorted(buffers.values(), key=lambda buffer: buffer.offset)
    ends = [*(buffer.offset for buffer in used[1:]), int(shared[1]) if shared else 0]
    for buffer, end in zip(used, ends, strict=False):
        buffer.bytes = buffer.bytes or max(0, end - buffer.offset)
        if buffer.kind == "barriers" and not buffer.waiters and buffer.readers:
            buffer.kind, buffer.shape = "tiles", buffer.shape.replace("barriers", "words")
    active = tuple(one for one in roles if one.number == 0 or _has_code(text, one.number))
    return Anatomy(
        kernel, int(total[1]) if total else warps, active, tuple(used), int(shared[1]) if shared else 0, tuple(steps)
    )


def _take(line: str, role: int, buffers: dict[str, Buffer], views: dict[str, str], steps: list[CodeStep]) -> None:
    """One line: an allocation, a view of one, or a use of some."""
    alloc = _ALLOC.search(line)
    if alloc:
        shape, size = alloc["type"].rpartition("x")[0], _bytes(alloc["type"])
        kind = "barriers" if alloc["type"].endswith("xi64") else "tiles"
        name = alloc["name"]
        called = kind if name.isdigit() else name  # the source gave it no name
        buffers[name] = Buffer(
            _unnumbered(called, buffers), kind, shape.replace("x", " x "), int(alloc["offset"]), size
        )
        if alloc["type"].endswith("xi64"):
            buffers[name].shape = f"{shape.split('x')[0]} barriers"
        return
    view = _VIEW.search(line)
    if view:
        views[view["name"]] = views.get(view["of"], view["of"])
        return
    for name in _NAMES.findall(line.partition(" = ")[0]) if " = " in line else ():
        views.pop(name, None)  # names come again in every role
    scratch = _SCRATCH.search(line)
    if scratch and "warp_specialize" not in line:
        name = f"scratch@{scratch['offset']}"
        buffers.setdefault(
            name,
            Buffer(_OWN_USE.get(scratch["op"], scratch["op"].strip('"')), "scratch", "", int(scratch["offset"]), 0),
        )
        buffers[name].writers.add(role)
        buffers[name].readers.add(role)
    names = {views.get(name, name) for name in _NAMES.findall(line.partition(" : ")[0])} & buffers.keys()
    for name in sorted(names):
        buffer = buffers[name]
        if _WAITS in line:
            buffer.waiters.add(role)
            steps.append(CodeStep(role, "wait", buffer.name))
        elif any(word in line for word in _BARRIERS) or any(word in line for word in _WRITES):
            buffer.writers.add(role)
            if counted := _ARRIVALS.search(line):
                buffer.arrivals = int(counted[1])
            if "arrive_barrier" in line:
                steps.append(CodeStep(role, "arrive", buffer.name))
            elif buffer.kind == "tiles":
                announced = "".join(buffers[n].name for n in names if buffers[n].kind == "barriers")
                steps.append(CodeStep(role, "fill" if announced else "write", buffer.name, announced))
        elif "local_load" in line or "warp_group_dot" in line or any(word in line for word in _SENDS):
            buffer.readers.add(role)
            steps.append(CodeStep(role, "read", buffer.name))


def _has_code(text: str, number: int) -> bool:
    """Partitions that only fill up a warp group have none."""
    body = re.search(rf"^\s*partition{number - 1}\(.*?\n(.*?)ttg\.warp_return", text, re.M | re.S)
    return bool(body and body[1].strip())


def _numbers(text: str, name: str) -> list[int]:
    found = re.search(rf"{name} = array<i32: ([\d, ]+)>", text)
    return [int(word) for word in found[1].split(",")] if found else []


def _bytes(kind: str) -> int:
    *sizes, element = kind.split("x")
    return math.prod(map(int, sizes)) * _BYTES.get(element, 4)


def _unnumbered(name: str, buffers: dict[str, Buffer]) -> str:
    """The name that the source gives it; the compiler numbers those that come again."""
    plain = re.sub(r"_\d+$", "", name)
    again = sum(re.sub(r" #\d+$", "", buffer.name) == plain for buffer in buffers.values())
    return f"{plain} #{again + 1}" if again else plain
