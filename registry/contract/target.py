"""What a kernel would run on: a real device, or one made up by its name, which can be asked all but to launch."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING

from registry.errors import InvalidArgument, shown
from registry.forks import new_lock

if TYPE_CHECKING:
    from torch import device as TorchDevice

KIB = 1024


@dataclass(frozen=True)
class Target:
    """One device and the toolchain around it. `Target.named("H100")` and `Target.named("sm86")` need no GPU."""

    arch: str
    name: str
    sm_count: int = 1
    shared_memory: int = 0
    """Bytes of shared memory that one block may ask for."""
    registers: int = 65536
    """32-bit registers that one block may hold."""
    memory_gbs: int = 0
    """What its memory gives by its data sheet, in GB/s; of a card that nobody has listed, as others of its kind."""
    torch: str = ""
    triton: str = ""
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""

    @functools.cached_property
    def sm(self) -> int:
        """The compute capability as a number (90 for sm90), 0 where there is none."""
        return int(self.arch[2:]) if re.fullmatch(r"sm\d+", self.arch) else 0

    @staticmethod
    def named(name: str) -> Target:
        """A made-up target by architecture ("sm90", "cpu") or device ("H100", "RTX 3090"), case and spaces aside; also
        by what a driver calls the device ("NVIDIA H100 80GB HBM3")."""
        found = _CATALOGUE.get(plain_device(name)) if isinstance(name, str) else None
        if found is None:
            raise InvalidArgument("target", shown(name), ", ".join(known_names()))
        return _with_toolchain(found, _version("torch"), _version("triton"))

    @staticmethod
    def of(device: TorchDevice) -> Target:
        """The target of a real torch device. Meta tensors have none: give `target=` for those."""
        if device.type == "cuda":
            return _cuda_target(device.index if device.index is not None else _current_cuda_device())
        if device.type == "cpu":
            return interpreted_as() or Target.named("cpu")
        raise InvalidArgument("device", device, "cpu or cuda; for meta tensors pass target=Target.named(...)")


@functools.lru_cache(maxsize=64)
def _with_toolchain(target: Target, torch: str, triton: str) -> Target:
    """One for all who ask: two of a kind are told to be the same by looking at all that they have."""
    return replace(target, torch=torch, triton=triton)


_interpreting: list[Target] = []
_guard = new_lock()


def interpreted_as() -> Target | None:
    """The GPU whose kernels an interpreter runs on this process's CPU tensors; None outside of the conformance kit."""
    return _interpreting[-1] if _interpreting else None


@contextlib.contextmanager
def interpreting(target: Target) -> Iterator[None]:
    """CPU tensors count as this GPU's inside the block, in every thread and context: a kernel's host side that asks
    what runs, or calls the registry again, then hears what it would on that GPU."""
    with _guard:
        _interpreting.append(target)
    try:
        yield
    finally:
        with _guard:
            _interpreting.remove(target)


@dataclass(frozen=True)
class _Device:
    name: str
    arch: str
    sm_count: int
    shared_memory_kib: int
    memory_gbs: int


# The first device of an architecture also answers for the bare arch name.
_DEVICES = (
    _Device("V100", "sm70", 80, 96, 900),
    _Device("T4", "sm75", 40, 64, 320),
    _Device("A100", "sm80", 108, 163, 2039),
    _Device("A100 PCIe", "sm80", 108, 163, 1935),
    _Device("A30", "sm80", 56, 163, 933),
    _Device("RTX 3090", "sm86", 82, 99, 936),
    _Device("A10", "sm86", 72, 99, 600),
    _Device("A10G", "sm86", 80, 99, 600),
    _Device("A40", "sm86", 84, 99, 696),
    _Device("RTX 4090", "sm89", 128, 99, 1008),
    _Device("L4", "sm89", 58, 99, 300),
    _Device("L40S", "sm89", 142, 99, 864),
    _Device("H100", "sm90", 132, 227, 3352),
    _Device("H100 PCIe", "sm90", 114, 227, 2039),
    _Device("H100 NVL", "sm90", 132, 227, 3938),
    _Device("H200", "sm90", 132, 227, 4800),
    _Device("H200 NVL", "sm90", 132, 227, 4800),
    _Device("GH200", "sm90", 132, 227, 4000),
    _Device("H20", "sm90", 78, 227, 4000),
    _Device("B200", "sm100", 148, 227, 8000),
    _Device("RTX 5090", "sm120", 170, 99, 1792),
)


# Of "MIG 1g.10gb" and "MIG 1g.20gb" the memory tells which it is.
_ADDED = re.compile(r"nvidia|geforce|tesla|(?<![\d.])\d+\s?gb(?![a-z\d])|hbm\d[a-z\d]*|sxm\d*|[\s_-]+")


def plain_device(name: str) -> str:
    """Without what makers and drivers add: "NVIDIA A100-SXM4-80GB" and "Tesla T4" are an A100 and a T4."""
    return _ADDED.sub("", name.lower())


def _build_catalogue() -> dict[str, Target]:
    catalogue = {"cpu": Target(arch="cpu", name="cpu")}
    for device in _DEVICES:
        shared_memory, gbs = device.shared_memory_kib * KIB, device.memory_gbs
        target = Target(device.arch, device.name, device.sm_count, shared_memory, memory_gbs=gbs)
        catalogue.setdefault(device.arch, replace(target, name=device.arch))
        catalogue[plain_device(device.name)] = target
    return catalogue


_CATALOGUE = _build_catalogue()


def known_names() -> list[str]:
    """Names that `Target.named` takes."""
    return sorted({target.name for target in _CATALOGUE.values()})


@functools.cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution).split("+")[0]
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _cuda_target(index: int) -> Target:
    import torch

    props = torch.cuda.get_device_properties(index)
    arch = f"sm{props.major}{props.minor}"
    listed = _CATALOGUE.get(plain_device(props.name)) or _CATALOGUE.get(arch)
    return Target(
        arch=arch,
        name=props.name,
        sm_count=props.multi_processor_count,
        shared_memory=props.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        memory_gbs=listed.memory_gbs if listed is not None else 0,
        torch=_version("torch"),
        triton=_version("triton"),
        driver=_driver_version(),
        cuda=torch.version.cuda or "",
        cudnn=_cudnn_version(torch.backends.cudnn.version()),
    )


def _cudnn_version(number: int | None) -> str:
    """ "9.19.0" for 91900."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}" if number else ""


def _current_cuda_device() -> int:
    import torch

    return torch.cuda.current_device()


@functools.cache
def _driver_version() -> str:
    """Read from the kernel module, which costs nothing; absent in some containers."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", file.read())
    except OSError:
        return ""
    return found.group(1) if found else ""
