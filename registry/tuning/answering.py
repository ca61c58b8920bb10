"""Who answers: each declaration is asked in a worker first, which can be killed where one never comes back.

Planning a sweep asks declarations in its own process, and so does the fit after it. Nothing ends one that hangs there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from registry.dispatch.catalog import catalog
from registry.notices import both_ends
from registry.ops.parts.cases import Case
from registry.toolbox.compile_pool import Child, WorkerDied
from registry.tuning.contestants import Selection

SHOWN = 300
"""Characters of how a worker ended."""


def who_answers(
    cases: Sequence[Case], selection: Selection, child: Child, timeout: float, note: Callable[[str], None]
) -> tuple[Selection, list[str]]:
    """The selection without variants whose declarations hang, or end their process, and the names of these. Each is
    told to `note` as it is found.

    One that raises answers, too: planning says so as dispatch does.
    """
    silent: list[str] = []
    for case in cases:
        for name in catalog.get().of(case.op):
            if name in silent or not selection.wants(name):
                continue
            try:
                child.ask({"do": "declared", "case": case.data(), "variant": name}, timeout)
            except WorkerDied as died:
                silent.append(name)
                note(f"{name}: its declaration {died.why} on {case.text}: {both_ends(died.detail, SHOWN)}")
    return dataclasses.replace(selection, skip=(*selection.skip, *silent)), silent
