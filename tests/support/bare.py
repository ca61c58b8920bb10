"""A built-in plugin's package without its marks for the profiler, under another name, for a comparison of builds."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = re.compile(r"^[ \t]*scopes\.(enter|leave)\([^\n]*\)\n", re.M)


@contextmanager
def without_scopes(package: str, folder: Path) -> Iterator[tuple[Any, int]]:
    """(the package, how many marks were taken out)."""
    source = Path(str(importlib.import_module(package).__file__)).parent
    bare = f"bare_{package.rpartition('.')[2]}"
    count = 0
    for path in source.rglob("*.py"):
        text, found = MARK.subn("", path.read_text(encoding="utf-8"))
        count += found
        to = folder / bare / path.relative_to(source)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(text.replace(package, bare), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(bare), count
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name == bare or name.startswith(f"{bare}.")]:
            del sys.modules[name]
