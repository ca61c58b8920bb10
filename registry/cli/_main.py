"""Finds commands by file name, runs them, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from registry.errors import InvalidArgument, RegistryError, UnknownOp, UnknownVariant
from registry.notices import drop_output, printable
from registry.toolbox.compile_pool import WorkerFailed

OK, FINDING, USAGE = 0, 1, 2
INTERRUPTED, TERMINATED = 130, 143
"""Ctrl-C and SIGTERM, as shells have them."""
PROGRAM = "kreg"
PACKAGE = __name__.rpartition(".")[0]
_USAGE_ERRORS = (InvalidArgument, UnknownOp, UnknownVariant, WorkerFailed)


class _ReaderGone(Exception):
    """Who reads our output, such as `head`, has seen enough."""


class Named(click.Group):
    """A group whose commands are things of one kind, which an unknown name is told."""

    kind = "command"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"{self.kind}: got {args[0]!r}; allowed: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class Commands(Named):
    """Finds commands by the file names of this folder, then asks plugins. Imports a command when it is used."""

    _plugins_loaded = False

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except BrokenPipeError:  # click would exit 1
            raise _ReaderGone from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise _ReaderGone from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load_plugin_commands()
        return sorted({*own_commands(), *self.commands})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in own_commands():
            command: click.Command = importlib.import_module(f"{PACKAGE}.{name}").command
            return command
        self._load_plugin_commands()
        return self.commands.get(name)

    def _load_plugin_commands(self) -> None:
        if not self._plugins_loaded:
            from registry.dispatch.discovery import load_commands

            self._plugins_loaded = True
            for failure in load_commands(self, own_commands()):
                click.echo(f"note: plugin {failure.plugin} failed: {printable(failure.error)}", err=True)


def own_commands() -> list[str]:
    """The names of the commands in this folder, which no plugin's command takes the place of."""
    return [
        module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)]) if not module.name.startswith("_")
    ]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kernel-registry", prog_name=PROGRAM)
def cli() -> None:
    """One front door, many kernels: what would run, why, and what is wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kreg` and return its exit code. A mistake in the arguments is one line on stderr, never a traceback."""
    try:
        try:
            result: Any = cli.main(
                args=None if arguments is None else list(arguments), prog_name=PROGRAM, standalone_mode=False
            )
        except click.exceptions.NoArgsIsHelpError as error:
            print(error.format_message())
            result = USAGE
        if sys.stdout is not None:  # which was closed before it began
            sys.stdout.flush()
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context else ""
        return _refuse(error.format_message() + hint)
    except _USAGE_ERRORS as error:
        return _refuse(str(error))
    except RegistryError as error:
        return _say(str(error), FINDING)
    except (click.Abort, KeyboardInterrupt):
        return _refuse("interrupted", INTERRUPTED)
    except (_ReaderGone, BrokenPipeError):
        drop_output()
        return OK
    except OSError as error:
        return _refuse(": ".join(map(str, filter(None, (error.filename, error.strerror or error)))))
    return result if isinstance(result, int) else OK


def _refuse(message: str, status: int = USAGE) -> int:
    """One line on stderr, and the status; who reads that may be gone, too."""
    return _say(" ".join(message.split()), status)


def _say(text: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        if sys.stderr is None:  # print would take stdout for it
            return status
        print(f"{PROGRAM}: {printable(text)}", file=sys.stderr)
    return status
