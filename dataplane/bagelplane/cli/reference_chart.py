"""The generated files of the Helm chart: the CRD as it stands in crds/ and as a template, and values.yaml.

The CRD comes from the models, the values from charts/bagelplane/values.schema.json.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from bagelplane.spec_schema import CRD_NAME, build_crd

CHART = "charts/bagelplane"
VALUES_SCHEMA = f"{CHART}/values.schema.json"
CRD_FILES = (f"crds/{CRD_NAME}.yaml", f"{CHART}/templates/crd.yaml")

_ORIGIN = "Written by `python -m bagelplane.cli.reference`; do not edit."
_LINE_CHARACTERS = 110


def build_chart_files(values_schema: Mapping[str, Any]) -> dict[str, str]:
    """Path below the repository to text of each file."""
    plain, template = CRD_FILES
    return {
        plain: f"# {_ORIGIN}\n{_dump(build_crd())}",
        template: _build_crd_template(),
        f"{CHART}/values.yaml": "\n".join(_values_lines(values_schema)) + "\n",
    }


def _build_crd_template() -> str:
    """The CRD between the switch of the values; Helm upgrades it, and leaves it when the release goes."""
    crd = build_crd()
    crd["metadata"]["annotations"] = {"helm.sh/resource-policy": "keep"}
    crd["metadata"]["labels"] = "LABELS"
    text = _dump(crd)
    assert "{{" not in text, "a description would be taken for a template of Helm's"
    labels = '\n    {{- include "bagelplane.labels" . | nindent 4 }}'
    text = text.replace(" LABELS\n", f"{labels}\n")
    return f"{{{{- /* {_ORIGIN} */ -}}}}\n{{{{- if .Values.crds.install }}}}\n{text}{{{{- end }}}}\n"


def _dump(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=_LINE_CHARACTERS, allow_unicode=True)


def _values_lines(schema: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {_ORIGIN}"
    yield "# It says what values.schema.json says; a table is in docs/reference/chart-values.md."
    for name, part in schema["properties"].items():
        yield from _value_lines(name, part, "")


def _value_lines(name: str, part: Mapping[str, Any], indent: str) -> Iterator[str]:
    if "default" not in part and "properties" not in part:
        return
    if not indent:
        yield ""
    yield from textwrap.wrap(
        part["description"],
        _LINE_CHARACTERS,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}# ",
    )
    if "default" in part:
        value = part["default"]
        lines = _dump({name: value}) if isinstance(value, dict) and value else f"{name}: {json.dumps(value)}"
        yield textwrap.indent(lines.rstrip(), indent)
        return
    yield f"{indent}{name}:"
    for child, child_part in part["properties"].items():
        yield from _value_lines(child, child_part, f"{indent}  ")


def value_rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each value, for a table."""
    definitions = {f"#/definitions/{name}": part for name, part in schema.get("definitions", {}).items()}
    yield from _rows(schema, definitions, prefix)


def _rows(
    schema: Mapping[str, Any], definitions: Mapping[str, Mapping[str, Any]], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    for name, part in schema["properties"].items():
        if "default" in part:
            whole = {**definitions.get(part.get("$ref", ""), {}), **part}
            default = f"`{json.dumps(part['default'])}`"
            yield f"`{prefix}{name}`", _kind(whole), default, part["description"]
        elif "properties" in part:
            yield from _rows(part, definitions, f"{prefix}{name}.")


def _kind(part: Mapping[str, Any]) -> str:
    if "minimum" in part:
        return f"{part['type']}, {part['minimum']} to {part['maximum']}"
    return str(part["type"])
