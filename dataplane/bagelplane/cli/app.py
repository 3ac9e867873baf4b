"""The `bagelplane` program: the table of commands, and what becomes of errors.

To add a command, add one line to COMMANDS. Its target is a function with typer's annotations, or a
`typer.Typer` with commands of its own; the module is imported when the command is used.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import bagelplane
from bagelplane.cli import describe_missing
from bagelplane.errors import BagelplaneError

EXIT_INTERRUPTED = 130  # as shells report SIGINT
EXIT_UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h: a fault of ours


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    target: str
    """`package.module:attribute`."""
    help: str
    """One line for the list of commands; the command's docstring is its full help."""


COMMANDS = (
    Command("validate", "bagelplane.cli.validate:validate", "Check resource files and name every fault."),
    Command("check", "bagelplane.cli.check:check", "Look at all that a resource names, as run does."),
    Command("plan", "bagelplane.cli.plan:plan", "Fill, mix and drops of the first packs, without decoding."),
    Command("index", "bagelplane.cli.index:index", "Look at all data once, so that planning need not."),
    Command("preview", "bagelplane.cli.preview:preview", "A picture of what the model will see."),
    Command(
        "explain", "bagelplane.cli.explain:explain", "Which rows went into one pack, and what was dropped."
    ),
    Command("find", "bagelplane.cli.find:find", "At which steps one row is trained on, or why it is not."),
    Command("run", "bagelplane.cli.run:run", "Start the sidecar for the trainers on this machine."),
    Command("top", "bagelplane.cli.top:top", "Watch a running sidecar in the terminal."),
    Command(
        "inject",
        "bagelplane.cli.inject:inject_command",
        "Put the sidecar into manifests, without the webhook.",
    ),
    Command(
        "snapshots",
        "bagelplane.cli.snapshots:app",
        "List, show, compare, check and prune the stored states of a run; import those of Automodel.",
    ),
    Command("demo", "bagelplane.cli.demo:demo", "See it all work on data that it makes itself."),
    Command("info", "bagelplane.cli.info:info", "What is installed here and what this machine offers."),
    Command("version", "bagelplane.cli.info:version", "Print the version."),
)


class LazyGroup(TyperGroup):
    """Lists the commands from the table, and imports one only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Stand-ins: enough for the list in the help and for "did you mean".
        self.commands = {command.name: TyperCommand(command.name, help=command.help) for command in COMMANDS}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of the table, not of the alphabet

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def load_command(name: str) -> Any:
    """The real command of that name, its module imported."""
    (command,) = (command for command in COMMANDS if command.name == name)
    module_name, _, attribute = command.target.partition(":")
    target = getattr(importlib.import_module(module_name), attribute)
    if isinstance(target, typer.Typer):
        loaded: Any = typer.main.get_group(target)
    else:
        single = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        single.command(name)(target)
        loaded = typer.main.get_command(single)
    loaded.name = name
    return loaded


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"{bagelplane.__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    log_level: Annotated[
        str, typer.Option(help="Least important log messages shown: debug, info, warning, error.")
    ] = "warning",
    version: Annotated[  # noqa: ARG001  (its callback does it)
        bool,
        typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_print_version),
    ] = False,
    debug: Annotated[  # noqa: ARG001  (main() takes it out; it stands here for the help)
        bool, typer.Option("--debug", help="Show a traceback with an error. May stand anywhere.")
    ] = False,
) -> None:
    """Bagelplane: the data plane for BAGEL-style multimodal training.

    Write what to train on into a resource file, then:

        bagelplane validate dataset.yaml
        bagelplane plan dataset.yaml --packs 1000
        bagelplane run dataset.yaml

    and take packs in the trainer with `bagelplane.client.PackedLoader`.

    Exit codes are those of docs/reference/exit-codes.md. Results go to stdout, the rest to stderr.
    """
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter("use debug, info, warning or error", param_hint="--log-level")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and end the process with the exit code of what happened."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in options or bool(os.environ.get("BAGELPLANE_DEBUG"))
    words = [word for word in options if word != "--debug"] + words[len(options) :]
    try:
        app(words, prog_name="bagelplane")
    except BagelplaneError as error:
        _report(f"error: {error}", debug)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        _report(f"error: {describe_missing(error)}", debug)
        sys.exit(BagelplaneError.exit_code)
    except Exception as error:  # noqa: BLE001  (the last stop before the user)
        name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        advice = "" if debug else " Fix: run it again with --debug and report what it prints."
        text = f"error: something unexpected happened in bagelplane {bagelplane.__version__}: {name}.{advice}"
        _report(text, debug)
        sys.exit(EXIT_UNEXPECTED)


def _report(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    main()
