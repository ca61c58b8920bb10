"""`kreg warm`: compile ahead what a list of problems will launch, for a GPU that need not be here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from registry.cli import FINDING, OK
from registry.cli._files import EXISTING
from registry.cli._page import Page, json_option, print_json
from registry.cli._plugins import plugin_option
from registry.errors import InvalidArgument


@click.command(
    "warm",
    help="Compile ahead the kernels that OP would launch for these SHAPES, such as b=4,hq=16,s=4096,d=128,causal. "
    "They go to Triton's cache, where the first launch finds them.",
)
@click.argument("op")
@click.argument("texts", metavar="[SHAPES]...", nargs=-1)
@click.option("--grid", metavar="NAME", help="A named grid of shapes, as in kreg tune.")
@click.option("--shapes", type=EXISTING, help="A file of shapes, one a line.")
@click.option("--recorded", type=EXISTING, help="Problems that registry.record() met, written by save_recorded.")
@click.option("--device", metavar="NAME", help='The GPU to compile for, such as "H100" or "sm90". [default: this one]')
@click.option("--variant", metavar="NAME", help="Compile this variant rather than the one that would be picked.")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once. [default: one a core, 8 at most]")
@click.option(
    "--try-out",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also launch what could be the fastest on this machine's GPU, time it, and write what was as tables to this "
    "folder, beside what was saved there before; REGISTRY_TABLES puts them in force.",
)
@plugin_option
@json_option
def command(
    op: str, texts: tuple[str, ...], variant: str | None, folder: Path | None, as_json: bool, **options: Any
) -> int:
    from contextlib import nullcontext

    import torch

    from registry.cli._problems import target_named
    from registry.dispatch.catalog import catalog
    from registry.dispatch.scope import use
    from registry.ops.known import op_named
    from registry.ops.parts.cases import Case
    from registry.trying import try_out
    from registry.tuning.extra import load_plugins
    from registry.tuning.grids import select
    from registry.warming import warm

    if folder is not None and (variant or options["device"]):
        raise click.UsageError("--try-out compares variants on this machine's GPU: leave out --variant and --device")

    op_named(op)
    load_plugins(options["plugins"])
    if variant is not None and variant not in op_named(op).variants:  # `use` of another op's would change nothing
        raise catalog.get().unknown(variant, op)
    cases = [Case.parse(op, text) for text in texts]
    if not cases or options["grid"] or options["shapes"] or options["recorded"]:
        cases += select(op, grid_name=options["grid"], shapes=options["shapes"], recorded=options["recorded"])
    target = target_named(options["device"]) if options["device"] else None
    # What tries out takes no --device, and says by itself that there is no GPU.
    if target is None and folder is None and not torch.cuda.is_available():
        raise InvalidArgument("--device", "none", 'a GPU to compile for, such as "H100", or cpu: there is none here')
    with (
        try_out() if folder is not None else nullcontext() as found,
        use(variant) if variant is not None else nullcontext(),
    ):
        warmed = warm(cases, target=target, jobs=options["jobs"])
    written = found.save(folder) if found is not None and folder is not None else []
    if as_json:
        print_json([dataclasses.asdict(one) for one in warmed])
    else:
        page = Page()
        for one in warmed:
            page.title(one.case)
            done = f"{one.variant or 'nothing'}: {one.kernels} kernels compiled in {one.seconds:.1f} s"
            page.line(done + (", launched once" if one.launched else ""), indent=2)
            if one.error:
                page.line(one.error, indent=2, style="red")
        if found is not None:
            page.title("Tried out")
            page.line(str(found), indent=2)
            for path in written:
                page.line(f"wrote {path}", indent=2)
    return FINDING if any(one.error for one in warmed) else OK
