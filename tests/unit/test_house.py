"""What the project promises about itself: pins, documents, and what each side has to have installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN_FILES = sorted((ROOT / "constraints").glob("*.txt"))
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# What a trainer image lacks when it follows docs/adr/0006 (its torch aside).
NOT_IN_A_TRAINER = [
    "PIL",
    "aiohttp",
    "av",
    "fsspec",
    "matplotlib",
    "prometheus_client",
    "pyarrow",
    "pydantic",
    "rich",
    "s3fs",
    "tokenizers",
    "typer",
    "yaml",
    "zstandard",
]

# Loaded into any program of an editable environment by its own .pth files.
BROUGHT_BY_THE_ENVIRONMENT = {"setuptools"}

# A finder ahead of all others refuses the named packages, as if they were not installed.
IMPORT_WITHOUT = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}: taken away by the test", name=name)
modules, absent = sys.argv[1].split(), set(sys.argv[2].split())
sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


def run_without(modules: list[str], absent: list[str], then: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_WITHOUT + then, " ".join(modules), " ".join(absent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def import_without(modules: list[str], absent: list[str]) -> None:
    finished = run_without(modules, absent)
    assert finished.returncode == 0, finished.stderr


def test_client_needs_nothing_of_the_sidecar() -> None:
    import_without(["bagelplane.client"], NOT_IN_A_TRAINER)


def test_numpy_reader_needs_no_torch() -> None:
    import_without(["bagelplane.client"], [*NOT_IN_A_TRAINER, "torch"])


def test_a_loader_without_torch_says_what_to_install() -> None:
    finished = run_without(
        ["bagelplane.client"], [*NOT_IN_A_TRAINER, "torch"], "from bagelplane.client import PackedLoader"
    )
    line = finished.stderr.splitlines()[-1]
    assert line.startswith("ModuleNotFoundError: PackedLoader needs torch")
    assert "Fix: install torch" in line


def test_the_program_of_a_client_only_install_says_in_one_line_what_it_lacks() -> None:
    finished = run_without(["bagelplane.cli"], NOT_IN_A_TRAINER, "sys.modules['bagelplane.cli'].main()")
    assert finished.returncode == 1
    assert finished.stderr.startswith(
        "error: the command line needs the package typer, which is not installed"
    )
    assert finished.stderr.count("\n") == 1
    assert "Fix: install bagelplane" in finished.stderr


def test_sidecar_and_command_line_need_no_torch() -> None:
    parts = ["cli.app", "images", "shm", "sidecar", "sources", "spec", "storage", "stream"]
    import_without([f"bagelplane.{part}" for part in parts], ["torch"])


def test_every_module_is_held_to_a_side() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (torch_free,) = (contract for contract in contracts if "never load torch" in contract["name"])
    paths = (ROOT / "dataplane" / "bagelplane").iterdir()
    modules = {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").exists()}
    may_load_torch = {"__init__", "cli", "client", "distributed_iterable", "packing"}
    held = {name.removeprefix("bagelplane.") for name in torch_free["source_modules"]}
    assert modules - may_load_torch == held, "Fix: name the module in the contract of pyproject.toml"


@pytest.mark.parametrize("path", PIN_FILES, ids=lambda path: path.name)
def test_pins_are_exact_hashed_and_name_no_address(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"://|^\s*(--(extra-)?index-url|--find-links|-[if]\b)", text, re.MULTILINE)
    packages = re.split(r"\n(?=\S)", text.strip())
    assert packages
    for package in packages:
        assert re.match(r"[a-z0-9.\[\]-]+==\S+ .*\\\n {4}--hash=sha256:", package), package.splitlines()[0]


def test_smaller_pin_files_agree_with_the_development_ones() -> None:
    everything = pinned_versions(ROOT / "constraints" / "dev.txt")
    for name in ("build.txt", "client.txt", "operator.txt", "sidecar.txt"):
        pins = pinned_versions(ROOT / "constraints" / name)
        differing = {package: pin for package, pin in pins.items() if everything.get(package, pin) != pin}
        assert not differing, f"{name} differs from dev.txt. Fix: make pins"


def test_operator_imports_nothing_that_its_image_lacks() -> None:
    names = [
        f"bagelplane_operator.{path.stem}"
        for path in (ROOT / "operator/bagelplane_operator").glob("[!_]*.py")
    ]
    script = f"""
import importlib, sys
from importlib.metadata import packages_distributions
for name in {[*names, "bagelplane_operator.__main__"]!r}:
    importlib.import_module(name)
owners = packages_distributions()
tops = {{name.partition(".")[0] for name in sys.modules}}
print(*sorted({{owner for top in tops for owner in owners.get(top, [])}}))
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    used = {re.sub(r"[-_.]+", "-", name).lower() for name in result.stdout.split()}
    pinned = pinned_versions(ROOT / "constraints" / "operator.txt")
    assert used - set(pinned) - {"bagelplane"} - BROUGHT_BY_THE_ENVIRONMENT == set()


def pinned_versions(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))


def test_readme_shows_the_examples_that_are_tested() -> None:
    readme = (ROOT / "README.md").read_text()
    whole = (ROOT / "docs" / "examples" / "train_loop.py").read_text()
    assert f"```python\n{whole}```" in readme
    # Of the cluster's the loop is shown; the story in tests/e2e runs these very files.
    examples = ROOT / "docs" / "examples" / "kubernetes"
    for language, file in (("python", "train.py"), ("yaml", "pytorchjob.yaml")):
        *_, shown = re.findall(rf"```{language}\n(.*?)```", readme, re.DOTALL)
        there = [line.strip() for line in (examples / file).read_text().splitlines()]
        assert [line for line in shown.splitlines() if line.strip() not in there] == []
    named = set(re.findall(r"docs/examples/kubernetes/[\w.]+", readme))
    assert named == {f"docs/examples/kubernetes/{path.name}" for path in examples.iterdir()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing
