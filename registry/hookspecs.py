"""The whole extension surface: what a plugin module may define. Called once, at load time; never per call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from registry.contract.variant import Variant

PROJECT = "kernel_registry"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def registry_variants() -> Iterable[Variant]:  # type: ignore[empty-body]
    """Return the variants that this plugin brings."""


@hookspec
def registry_tables() -> Iterable[Path]:  # type: ignore[empty-body]
    """Return paths of YAML dispatch tables (files or folders) that this plugin ships."""


@hookspec
def registry_commands(cli: Any) -> None:
    """Add commands to the `kreg` command line: `cli` is its click group."""
