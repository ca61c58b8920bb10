"""Whether this package is alone in its folder: another distribution may ship a package `registry`, too."""

from __future__ import annotations

import os
import warnings

DISTRIBUTION = "kernel-registry"
_COMMONPLACE = frozenset(("__pycache__",))


def foreign(folder: str) -> list[str]:
    """What lies in the folder of this package but not in its list of files. Nothing where there is none: a checkout.

    It is asked at each import, so it reads our own list alone; `doctor.strangers` says whose it is.
    """
    around, package = os.path.split(folder)
    start = DISTRIBUTION.replace("-", "_") + "-"
    try:
        listed = [name for name in os.listdir(around) if name.startswith(start) and name.endswith(".dist-info")]
        ours = set(_COMMONPLACE)
        for name in listed:
            with open(os.path.join(around, name, "RECORD"), encoding="utf-8", errors="replace") as record:
                ours.update(
                    line.split("/", 2)[1].partition(",")[0] for line in record if line.startswith(package + "/")
                )
        there = {name for name in os.listdir(folder) if not name.startswith(".")}
        return sorted(there - ours) if len(ours) > len(_COMMONPLACE) else []
    except OSError:
        return []


def warn_of_foreign(folder: str) -> None:
    """Say once, at import, that another distribution writes to our folder."""
    if found := foreign(folder):
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        text = f"{folder} holds what {DISTRIBUTION} did not install ({names}): `kreg doctor` names who ships it"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
