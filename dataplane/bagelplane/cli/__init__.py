"""The command line: one file a command, found through the table in `app`.

A command reads its arguments, calls the package and shows the result; it holds no logic that another program
could want. Heavy imports stay inside the command's file, which is loaded only when the command runs, so that
`--help` is there at once. Results go to stdout (a table, or JSON with `-o json`), everything else to stderr.
Nothing below may import this package. It runs in the main thread of the process that the user started.
"""

from __future__ import annotations

import sys


def main() -> None:
    """The `bagelplane` program. Where only the client is installed it says so in one line."""
    try:
        from bagelplane.cli.app import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {describe_missing(error)}\n")
        sys.exit(1)
    run()


def describe_missing(error: ModuleNotFoundError) -> str:
    """What is missing for the command line, and how to get it."""
    return (
        f"the command line needs the package {error.name}, which is not installed here. Fix: install bagelplane "
        "with its dependencies (pip install bagelplane); without them only bagelplane.client works"
    )
