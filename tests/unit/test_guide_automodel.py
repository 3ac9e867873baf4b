"""What the guide for Automodel's users shows can be built: names exist and take the arguments shown."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "automodel.md"
SNIPPETS = re.findall(r"```(yaml|python)\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.mark.parametrize("text", [text for language, text in SNIPPETS if language == "yaml"])
def test_a_target_of_the_guide_is_made_with_the_arguments_beside_it(text: str) -> None:
    for section in yaml.safe_load(text).values():
        module, name = section.pop("_target_").rsplit(".", 1)
        made = getattr(importlib.import_module(module), name)(**section)
        assert hasattr(made, "state_dict")


# torchdata asks torch for something that torch has come to call deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("text", [text for language, text in SNIPPETS if language == "python"])
def test_the_python_of_the_guide_runs(text: str) -> None:
    names: dict[str, object] = {}
    exec(text, names)
    assert any(inspect.isclass(value) for value in names.values())
