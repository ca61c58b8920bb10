"""`kreg inspect`: what the compiler makes of a variant's kernels, for any architecture and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from registry.cli import FINDING, OK
from registry.cli._main import Named
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option, plugins_in
from registry.cli._problems import matching, problem_from, problem_options
from registry.notices import last_line

COUNTS = ("HGMMA", "QGMMA", "tcgen05", "HMMA", "TMA load", "TMA store", "cp.async", "BAR", "SYNCS", "MUFU")


class _Variants(Named):
    """One subcommand a variant, with the options of its op's problems."""

    kind = "variant"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for name, variant in _variants().items() if variant.builds is not None)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and not args[0].startswith("-"):
            from registry.dispatch.catalog import catalog
            from registry.tuning.extra import load_plugins

            load_plugins([*ctx.params["plugins"], *plugins_in(args[1:])])
            if args[0] not in _variants():
                self._refuse_unknown_options(ctx, args[1:])
            catalog.get().named(args[0])
        return super().resolve_command(ctx, args)

    def _refuse_unknown_options(self, ctx: click.Context, args: list[str]) -> None:
        """Name an option that no variant has before a variant that is not known."""
        by_op = {variant.op: variant for variant in _variants().values()}
        known = {flag for variant in by_op.values() for option in _command(variant).params for flag in option.opts}
        for word in args:
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in {*known, "--help", "--"}:
                raise click.NoSuchOption(flag, ctx=ctx)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        variant = _variants().get(name)
        return _command(variant) if variant is not None else None


command = _Variants(
    name="inspect",
    help="Registers, spills, shared memory, occupancy and instructions of a variant's kernels, compiled for any GPU.",
    no_args_is_help=True,
)
plugin_option(command)


def _variants() -> dict[str, Any]:
    from registry.dispatch.catalog import catalog

    return catalog.get().variants


def _command(variant: Any) -> click.Command:
    from registry.ops.known import op_named

    op = op_named(variant.op)
    options = [option for option in problem_options(op) if option.name != "device"]
    options += [
        click.Option(
            ["--arch", "--device", "device"],
            metavar="NAME",
            default="sm90",
            show_default=True,
            help='A target: "sm90", "H100", "RTX 3090".',
        ),
        click.Option(["--config"], metavar="K=V,..", help="One config, by the values that single it out."),
        click.Option(["--all-configs"], is_flag=True, help="Every declared config, those that do not fit included."),
        click.Option(["--sass"], is_flag=True, help="Print the machine code."),
        click.Option(["--ptx"], is_flag=True, help="Print the PTX."),
        click.Option(
            ["--save"],
            metavar="FOLDER",
            type=click.Path(path_type=Path, file_okay=False),
            help="Write SASS and PTX to files.",
        ),
    ]
    made = click.Command(
        variant.name,
        params=options,
        callback=lambda plugins, **values: inspect(variant, **values),  # which brought it, where they did
        help=variant.summary or None,
    )
    plugin_option(made)
    json_option(made)
    return made


def inspect(
    variant: Any,
    *,
    config: str | None,
    all_configs: bool,
    sass: bool,
    ptx: bool,
    save: Path | None,
    as_json: bool,
    **values: Any,
) -> int:
    """Compile and describe; 1 where something spills, does not fit, or does not compile, as on an architecture that
    the variant does not run on."""
    from registry.ops.known import op_named

    if variant.builds is None:
        raise click.UsageError(f"{variant.name} declares no builds, so there is nothing to compile without a GPU")
    problem = problem_from(op_named(variant.op), values)
    if not problem.target.arch.startswith("sm"):
        raise click.UsageError(f"--arch: got {problem.target.arch}; allowed: a GPU such as sm90 or H100")
    reasons = variant.reasons(problem)
    configs = _configs(variant, problem, config, all_configs)
    foreign = any(reason.field == "arch" for reason in reasons)  # compilers may abort on code for another one
    compiled = [] if foreign else configs
    found = [
        _kernel(variant, problem, chosen, build) for chosen in compiled for build in _builds(variant, problem, chosen)
    ]
    if as_json:
        data = {
            "variant": variant.name,
            "problem": problem.summary(),
            "reasons": list(map(str, reasons)),
            "kernels": [_data(kernel, sass, ptx) for kernel in found],
        }
        print_json(data)
    else:
        _print(variant, problem, reasons, found, sass, ptx)
        if foreign:
            click.echo(f"nothing is compiled: {variant.name} does not run on {problem.target.arch}")
    if save is not None:
        _save(variant, found, save)
    return FINDING if foreign or any(kernel["findings"] for kernel in found) else OK


def _configs(variant: Any, problem: Any, wanted: str | None, everything: bool) -> list[dict[str, Any]]:
    """The configs to compile: those that match, all, or the variant's own first legal one."""
    from registry.contract.capability import config_reasons
    from registry.dispatch.configs import misfits
    from registry.ops.parts.cases import parse_words

    declared = [dict(config) for config in variant.configs_for(problem)]
    if wanted:
        asked = parse_words(wanted)
        if found := matching(declared, asked):
            return found
        base = declared[0] if declared else {}
        if not set(asked) <= set(base):
            raise click.UsageError(f"--config: got {wanted!r}; allowed: {', '.join(base) or 'nothing'}")
        if refused := misfits(declared, {**base, **asked}):
            raise click.UsageError(f"--config: {'; '.join(map(str, refused))}")
        return [{**base, **asked}]
    if everything or not declared:
        return declared
    return [next((c for c in declared if not config_reasons(variant.requires, problem, c)), declared[0])]


def _builds(variant: Any, problem: Any, config: Mapping[str, Any]) -> list[Any]:
    try:
        return list(variant.builds(problem, config))
    except Exception as error:  # shown in the place of the kernel that it is about
        return [error]


def _kernel(variant: Any, problem: Any, config: dict[str, Any], build: Any) -> dict[str, Any]:
    """One kernel's resources, or what went wrong, and whatever about it is a finding."""
    from registry.toolbox.builds import compile_build
    from registry.toolbox.builds import inspect as resources_of

    declared = _declared(variant, problem, config)
    found: dict[str, Any] = {
        "config": config,
        "name": getattr(build, "name", "?"),
        "declared": declared,
        "findings": [],
    }
    try:
        if isinstance(build, Exception):
            raise build
        found["resources"] = resources = resources_of(compile_build(build, problem.target))
    except Exception as error:
        found["findings"].append(f"does not compile: {last_line(error)}")
        return found
    if resources.spills:
        found["findings"].append(f"spills: {resources.spill_stores} bytes stored, {resources.spill_loads} loaded")
    if resources.shared > problem.target.shared_memory:
        found["findings"].append(f"shared memory: {resources.shared} bytes, {problem.target.shared_memory} allowed")
    said = declared["shared_memory"]
    if said is not None and said < resources.shared:
        found["findings"].append(f"declares {said} bytes of shared memory, needs {resources.shared}")
    found["findings"] += [f"ptxas: {warning}" for warning in resources.ptxas_warnings]
    return found


def _declared(variant: Any, problem: Any, config: Mapping[str, Any]) -> dict[str, int | None]:
    budgets = {name: getattr(variant.requires, name) for name in ("shared_memory", "registers")}
    return {name: budget(problem, config) if budget is not None else None for name, budget in budgets.items()}


def _print(variant: Any, problem: Any, reasons: Any, found: list[dict[str, Any]], sass: bool, ptx: bool) -> None:
    from registry.contract.describe import config_text

    page = Page()
    page.title(f"{variant.name} for {problem.summary()}")
    for reason in reasons:
        page.line(f"illegal here: {reason}", style="yellow", indent=2)
    for kernel in found:
        page.gap()
        page.title(f"{kernel['name']}  {config_text(kernel['config'])}".rstrip())
        resources = kernel.get("resources")
        if resources is not None:
            page.rows(_rows(problem, resources, kernel["declared"]))
        for finding in kernel["findings"]:
            page.line(finding, style="red", indent=2)
        if resources is not None and ptx:
            click.echo(resources.ptx)
        if resources is not None and sass:
            click.echo(resources.sass)


def _rows(problem: Any, resources: Any, declared: Mapping[str, int | None]) -> list[tuple[str, str]]:
    said = {name: f", declared {value}" if value is not None else "" for name, value in declared.items()}
    total = resources.registers * resources.threads
    groups = f"; warp groups set {', '.join(map(str, resources.setmaxnreg))}" if resources.setmaxnreg else ""
    counts = "  ".join(f"{name} {resources.counts[name]}" for name in COUNTS if resources.counts.get(name))
    return [
        ("registers", f"{resources.registers} a thread at launch, {total} a block of 65536{said['registers']}{groups}"),
        ("spills", f"{resources.spills} bytes" + (f", stack {resources.stack} bytes" if resources.stack else "")),
        ("shared", f"{resources.shared} bytes of {problem.target.shared_memory}{said['shared_memory']}"),
        ("threads", f"{resources.threads} a block"),
        ("occupancy", f"{resources.blocks_per_sm} blocks an SM, {100 * resources.occupancy:.0f}% of its warps"),
        ("code", f"{sum(resources.opcodes.values())} instructions: {counts}"),
    ]


def _data(kernel: dict[str, Any], sass: bool, ptx: bool) -> dict[str, Any]:
    found = {name: value for name, value in kernel.items() if name != "resources"}
    resources = kernel.get("resources")
    if resources is not None:
        names = ("registers", "stack", "spill_stores", "spill_loads", "shared", "threads", "blocks_per_sm", "occupancy")
        found |= {name: getattr(resources, name) for name in names}
        found |= {"counts": dict(resources.counts), "setmaxnreg": list(resources.setmaxnreg)}
        found |= {name: getattr(resources, name) for name, wanted in (("sass", sass), ("ptx", ptx)) if wanted}
    return found


def _save(variant: Any, found: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, kernel in enumerate(found):
        resources = kernel.get("resources")
        for kind in ("sass", "ptx") if resources is not None else ():
            (folder / f"{variant.name}.{number}.{kernel['name']}.{kind}").write_text(
                getattr(resources, kind), encoding="utf-8"
            )
