"""What a measurement was made on: device, clocks, throttling, versions. nvidia-ml-py is asked where it is installed."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Callable
from typing import Any

from registry.contract.target import Target

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be".
_THROTTLE = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake"}


def target_data(target: Target) -> dict[str, Any]:
    return dataclasses.asdict(target)


def target_from(data: dict[str, Any]) -> Target:
    names = {field.name for field in dataclasses.fields(Target)}
    return Target(**{name: value for name, value in data.items() if name in names})


def describe(target: Target) -> dict[str, Any]:
    """The machine as a results file records it."""
    import torch

    found: dict[str, Any] = {
        "device": target.name,
        "arch": target.arch,
        "sm_count": target.sm_count,
        "driver": target.driver,
        "torch": torch.__version__,
        "triton": target.triton,
        "python": platform.python_version(),
        "host": platform.machine(),
        "cpus": os.cpu_count(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    if target.arch != "cpu":
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found.update(Monitor().limits())
    return found


class Monitor:
    """Reads a GPU's clocks through NVML; answers with nothing where NVML is not to be had."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
            uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
            try:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            except Exception:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
            self._nvml = pynvml
        except Exception:  # no package, no library, no permission: measuring goes on without clocks
            self._nvml = None

    def limits(self) -> dict[str, Any]:
        """Largest clocks, the power cap, and how many processes share the GPU."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        return _present(
            {
                "max_sm_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                "max_memory_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM),
                "power_cap_w": lambda: round(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
                "driver": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
                "processes": lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
            }
        )

    def __call__(self) -> dict[str, Any]:
        """Clock, power, temperature and reasons for throttling now."""
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return {}
        found = _present(
            {
                "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                "watts": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
                "celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                "throttle": lambda: _throttle(nvml, handle),
            }
        )
        return {name: value for name, value in found.items() if value not in ([], "")}


def _present(readers: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    found = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except Exception:  # not every GPU answers every question
            continue
    return found


def _throttle(nvml: Any, handle: Any) -> list[str]:
    read = (
        getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    )
    bits = read(handle)
    return [name for bit, name in _THROTTLE.items() if bits & bit]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def slug(name: str) -> str:
    """A device name as part of a file name: "nvidia-h200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
