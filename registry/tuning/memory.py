"""How much memory a worker on the CPU may take: a kernel that wants more fails by itself alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

SHARE = 0.75
"""Of what is available: the parent, the compilers and whatever else runs have the rest."""
GROUPS = Path("/sys/fs/cgroup")


def leave_some() -> None:
    """Limit what this process may still allocate to a share of what is available now, where the platform can.

    RLIMIT_DATA counts what may be written to. RLIMIT_AS would count what is only reserved, too: arenas of threads,
    mapped libraries.
    """
    room = available()
    if room is None:
        return
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        held = 1024 * _figures(Path("/proc/self/status"))["VmData"]
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = held + int(SHARE * room)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def available() -> int | None:
    """Bytes that can be had without swapping, in this machine and in the container around us; None if nobody tells."""
    try:
        room = 1024 * _figures(Path("/proc/meminfo"))["MemAvailable"]
    except (OSError, KeyError):
        return None
    return max(0, min(room, *_left_in_groups()))


def _left_in_groups() -> Iterator[int]:
    """What each control group with a limit has left, those around ours too. Cached files give way."""
    yield 1 << 62
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("::")[2].strip().lstrip("/")
    except OSError:
        return
    for group in (GROUPS / own, *(GROUPS / own).parents):
        with contextlib.suppress(OSError, ValueError, KeyError):  # "max", or no such file
            limit, used = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
            yield limit - used + _figures(group / "memory.stat")["inactive_file"]


def _figures(path: Path) -> dict[str, int]:
    """The lines of a file of the kernel's that are a name and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
