"""Finds variants: built-ins from `registry.plugins`, third parties from entry points, notebooks through `register`.

Runs once, at first use. A plugin that fails is contained, kept with its error and shown; it never takes another along.
What it prints meanwhile goes to stderr. While it loads it may call `registry.register`, but no op: which variants
there are is not known yet.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any

from registry.contract.declared import check_declaration
from registry.contract.problem import PROBLEM_TYPES
from registry.contract.variant import Variant
from registry.errors import WIDEST, DeclarationError, DuplicateVariant, Portable, RegistryError, UnknownVariant, shown
from registry.notices import clip, notice, printable, told
from registry.signals import interrupts

if TYPE_CHECKING:
    import pluggy

log = logging.getLogger("registry")

BUILTIN_PACKAGE = "registry.plugins"
ENTRY_POINT_GROUP = "kernel_registry"


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that could not be loaded, or a part of it that could not be used."""

    plugin: str
    error: str


@dataclass(frozen=True)
class Catalog:
    """Everything discovery found. Immutable: registering makes a new one."""

    variants: dict[str, Variant] = field(default_factory=dict)
    tables: tuple[tuple[str, Path], ...] = ()
    failures: tuple[PluginFailure, ...] = ()
    plugins: tuple[str, ...] = ()
    _by_op: dict[str, Mapping[str, Variant]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, op: str) -> Mapping[str, Variant]:
        """The variants of one op, by name, in alphabetical order."""
        found = self._by_op.get(op)
        if found is None:
            own = {name: variant for name, variant in sorted(self.variants.items()) if variant.op == op}
            found = self._by_op[op] = MappingProxyType(own)
        return found

    def named(self, name: object) -> Variant:
        """The variant of that name."""
        found = self.variants.get(name) if isinstance(name, str) else None
        if found is None:
            raise self.unknown(name, "any")
        return found

    def unknown(self, name: Any, op: str) -> UnknownVariant:
        """The error of a name that no variant of an op, or of any, has; a plugin that failed may have brought it."""
        known = self.variants if op == "any" else self.of(op)
        failed = [f"{one.plugin}: {clip(one.error, WIDEST)}" for one in self.failures]
        return UnknownVariant(name, op, sorted(known), failed)

    def with_variant(self, variant: Variant, origin: str) -> Catalog:
        """This catalog plus one variant. Two of one name are an error that names both origins."""
        if not isinstance(variant, Variant):
            raise DeclarationError(f"{origin}: got {type(variant).__name__}; allowed: a Variant")
        check_declaration(variant)
        known = self.variants.get(variant.name)
        if known is not None:
            raise DuplicateVariant(variant.name, known.origin, origin)
        return replace(self, variants={**self.variants, variant.name: replace(variant, origin=origin)})

    def with_tables(self, plugin: str, paths: Iterable[Path]) -> Catalog:
        """This catalog plus the tables that a plugin ships."""
        return replace(self, tables=(*self.tables, *((plugin, path) for path in paths)))

    def with_failure(self, plugin: str, error: BaseException) -> Catalog:
        """This catalog plus one failed plugin, which is logged once, here."""
        text = told(error)
        log.warning("plugin %s failed and is left out: %s", plugin, printable(text))
        return replace(self, failures=(*self.failures, PluginFailure(plugin, text)))


def discover(registered: list[Variant] | None = None) -> Catalog:
    """Load every plugin once and collect what it declares. `registered` is where its calls of `register` end up."""
    found = Catalog()
    registered = [] if registered is None else registered
    manager = new_manager()
    for name, load in _loaders():
        registered.clear()
        try:
            with contained():
                found = collect(found, manager, load(), name, registered)
        except PluginFailed as failed:
            found = found.with_failure(name, failed.error)
    registered.clear()
    return found


class PluginFailed(Portable):
    """Whatever a plugin's code raised, so that `except` need not say what that may be."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Around a plugin's own code: its prints go to stderr, and all that it raises, SystemExit too, is PluginFailed; but
    not what a signal raises meanwhile."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except BaseException as error:
        if interrupts(error):
            raise
        raise PluginFailed(error) from None


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the registry's hooks."""
    import pluggy

    from registry import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load_commands(cli: Any, taken: Collection[str]) -> list[PluginFailure]:
    """Let each plugin add its commands to the command line; those that fail are reported, not raised, and leave it as
    it was. Those of `taken` names, which are never reached, are said, and those of a plugin before it, which stay."""
    failures, owner = [], dict[str, str]()
    for name, load in _loaders():
        manager, before = new_manager(), dict(cli.commands)
        try:
            with contained():
                manager.register(load(), name=name)
                manager.hook.registry_commands(cli=cli)
                _check_commands(cli.commands)
        except PluginFailed as failed:
            failures.append(PluginFailure(name, told(failed.error)))
            cli.commands.clear()
        cli.commands.update({one: command for one, command in before.items() if one not in cli.commands})
        for command in sorted(one for one in cli.commands if cli.commands[one] is not before.get(one)):
            if command in taken:
                notice(f"plugin {name}: its command {command!r} is never reached: kreg has one of that name")
            elif owner.setdefault(command, name) != name:
                notice(
                    f"plugin {name}: its command {command!r} is never reached: {owner[command]} has one of that name"
                )
                cli.commands[command] = before[command]
    return failures


def _check_commands(commands: Mapping[Any, Any]) -> None:
    import click

    for name, command in commands.items():
        if not isinstance(name, str) or not isinstance(command, click.Command):
            got = f"{shown(name)}: {type(command).__name__}"
            raise DeclarationError(f"registry_commands: got {got}; allowed: commands of click, by their names")


def collect(
    found: Catalog, manager: pluggy.PluginManager, plugin: Any, name: str, more: Iterable[Variant] = ()
) -> Catalog:
    """The catalog with what one plugin declares, by its hooks and in `more`. Raises what is wrong with it."""
    manager.register(plugin, name=name)
    try:
        _check_names(manager)
        asked = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
        for hook in sorted(vars(manager.hook).keys() - asked):
            if callable(getattr(plugin, hook, None)):
                raise DeclarationError(f"{hook}: got a function without a mark; allowed: one with @registry.hookimpl")
        if not asked and not more:
            raise DeclarationError(f"{name} has no hook: mark registry_variants with @registry.hookimpl")
        declared = _answers(manager, plugin, "registry_variants")
        tables = [_path(given) for given in _answers(manager, plugin, "registry_tables")]
    except BaseException:
        manager.unregister(name=name)
        raise
    for variant in (*declared, *more):
        found = found.with_variant(variant, name)
        if variant.op not in PROBLEM_TYPES:
            known = ", ".join(sorted(op for op in PROBLEM_TYPES if op))
            raise DeclarationError(f"Variant {variant.name}: op: got {variant.op!r}; allowed: {known}")
    return replace(found.with_tables(name, tables), plugins=(*found.plugins, name))


def _check_names(manager: pluggy.PluginManager) -> None:
    """Raise for a hook that is misspelt."""
    import pluggy

    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        known = ", ".join(sorted(hook for hook, caller in vars(manager.hook).items() if caller.has_spec()))
        raise DeclarationError(f"{error}; allowed: {known}") from None


def _answers(manager: pluggy.PluginManager, plugin: Any, hook: str) -> list[Any]:
    """What one plugin's hook lists, asked on its own. A hook that forgets to return is an error."""
    caller = manager.subset_hook_caller(hook, [other for other in manager.get_plugins() if other is not plugin])
    answers = caller()
    if len(answers) < len(caller.get_hookimpls()):
        raise DeclarationError(f"{hook}: got None; allowed: a list")
    return [one for answer in answers for one in _listed(hook, answer)]


def _listed(hook: str, answer: Any) -> list[Any]:
    """What a hook lists; anything but a list, or what may be read as one, is an error."""
    if isinstance(answer, (str, bytes, os.PathLike, Variant, Mapping)) or not isinstance(answer, Iterable):
        raise DeclarationError(f"{hook}: got {type(answer).__name__}; allowed: a list")
    return list(answer)


def _path(given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)):
        raise DeclarationError(f"registry_tables: got {type(given).__name__} in its list; allowed: paths")
    path = Path(given)
    if not path.is_absolute():  # it would be another file in each working directory
        raise DeclarationError(f"registry_tables: got {shown(str(given))}; allowed: whole paths, as of Path(__file__)")
    return path


def _loaders() -> list[tuple[str, Any]]:
    """(name, loader) of every plugin, built-ins first, in a fixed order."""
    try:
        package: ModuleType = importlib.import_module(BUILTIN_PACKAGE)
    except ModuleNotFoundError as error:
        raise RegistryError(
            f"{BUILTIN_PACKAGE} cannot be imported: kernel-registry is not installed; run: pip install -e ."
        ) from error
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    loaders: list[tuple[str, Any]] = []
    for name in names:
        full = f"{BUILTIN_PACKAGE}.{name}"
        loaders.append((full, lambda full=full: importlib.import_module(full)))
    for point in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
        loaders.append((f"{point.name} ({point.value})", point.load))
    return loaders
