"""The `kreg` command line.

One file a command: registry/cli/<name>.py defines `command`, a click command, and is imported only when it is asked for
(so imports that are heavy belong inside its function). Nothing else lists it. Files whose names begin with "_" are
helpers: `_main` finds and runs commands, `_page` prints, `_problems` turns options into a Problem. Plugins add commands
with the `registry_commands` hook.

Exit codes: 0 fine, 1 a finding or an illegal variant, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
"""

from registry.cli._main import FINDING, INTERRUPTED, OK, TERMINATED, USAGE, cli, main

# No code here: each imported command becomes an attribute of this package, and one of them is called `list`.
__all__ = ["FINDING", "INTERRUPTED", "OK", "TERMINATED", "USAGE", "cli", "main"]
