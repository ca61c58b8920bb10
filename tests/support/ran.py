"""Processes that are to end well, and plugins as pip leaves them behind, for these to find."""

from __future__ import annotations

import subprocess
import textwrap
import time
from pathlib import Path
from typing import Any


def printed(*command: object, allowed: int = 0, **how: Any) -> str:
    """What a process printed to stdout; with another exit status than `allowed` the test fails and shows the rest."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **how)
    assert done.returncode == allowed, f"exit status {done.returncode}\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    return done.stdout


def gone(pid: int) -> bool:
    """Whether a process ends within ten seconds, which its new parent may not have asked about yet."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def install_plugin(folder: Path, module: str, source: str) -> None:
    """A module that is an entry point of ours, in a folder that may become a part of the path."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    about = folder / f"{module}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[kernel_registry]\n{module} = {module}\n")
