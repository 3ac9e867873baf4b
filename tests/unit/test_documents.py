"""What the documents print can be typed: names that examples import are there, commands and options are ours."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest

from bagelplane.cli.app import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")}
    - {*(ROOT / "docs/adr").iterdir()}
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted((ROOT / "docs").rglob("*.py"))], ids=name_of)
def test_names_that_an_example_imports_are_there(path: Path) -> None:
    text = path.read_text()
    blocks = (
        [text]
        if path.suffix == ".py"
        else re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    )
    for block in blocks:
        if "--8<--" in block:
            continue  # another file, which is looked at itself
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bagelplane"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_and_options_in_a_document_are_ours(path: Path) -> None:
    lines = re.findall(r"^(?: {4,}|\$ )(bagelplane .*)", path.read_text().replace("\\\n", " "), re.MULTILINE)
    for line in lines:
        words = [word for word in re.split(r"\s[|#&]\s?", line)[0].split()[1:] if word != "COMMAND"]
        if not words or words[0].startswith("-"):
            continue
        assert words[0] in {command.name for command in COMMANDS}, line
        command = load_command(words[0])
        command = getattr(command, "commands", {}).get(words[1] if len(words) > 1 else "", command)
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("-") and option not in ("-", "--help"):
                assert option in known, f"{line}: no {option}"
