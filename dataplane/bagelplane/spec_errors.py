"""From YAML text to plain data, and from what is wrong with it to one line a problem.

Job: read one YAML document so that nothing is silently lost (duplicate keys, several documents, `yes` read as
true), remember in which line each value stands, and put pydantic's findings into our own words.
It knows nothing of the resource's fields; those are in `spec`.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bagelplane.errors import SpecError

Loc = tuple[str | int, ...]

MAX_DOCUMENT_CHARACTERS = 1_000_000  # etcd takes 1.5 MB an object; a longer file is not a resource
MAX_DOCUMENT_NODES = 50_000  # counted after aliases are expanded, so that a few lines cannot fill the memory
_SHOWN_VALUE_CHARACTERS = 60
_MAX_FINDINGS = 200  # each is compared with the names of fields; nobody reads on


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where: `loc` is made of field names (camelCase) and list positions."""

    loc: Loc
    what: str
    got: str = ""
    fix: str = ""
    line: int = 0
    """1-based line of the YAML text; 0 where there is none."""

    @property
    def path(self) -> str:
        """As a person writes it: `spec.groups[1].weight`."""
        return format_path(self.loc)

    def __str__(self) -> str:
        head = f"{self.path}: {self.what}" if self.loc else self.what
        aside = ", ".join(
            part for part in (self.got and f"got {self.got}", self.line and f"line {self.line}") if part
        )
        head = f"{head} ({aside})" if aside else head
        return f"{head}. Fix: {self.fix}" if self.fix else head


class InvalidDatasetError(SpecError):
    """A resource with at least one problem; the message has one line for each."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) == 1:
            super().__init__(f"{source}: {lines[0]}")
        else:
            super().__init__("\n  ".join([f"{source}: {len(lines)} problems", *lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.source, self.problems)


class FieldValueError(ValueError):
    """Raised by a field's own validator; the path is added later."""

    def __init__(self, what: str, *, fix: str = "", secret: bool = False) -> None:
        super().__init__(what)
        self.what, self.fix, self.secret = what, fix, secret


class RuleError(ValueError):
    """Rules between fields that do not hold; the paths are relative to the model that has the rule."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class SpecModel(BaseModel):
    """Base of all parts of the resource: camelCase in YAML, snake_case in Python, frozen, no unknown fields.

    Values are not converted (`"1"` is no number): the API server does not either, and one file must mean
    the same in both places.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=False,
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty(cls, data: object) -> object:
        """`region:` with nothing behind it is a field left out, as in the API server."""
        if not isinstance(data, Mapping):
            return data
        known = {info.alias or name for name, info in cls.model_fields.items()} | set(cls.model_fields)
        return {name: value for name, value in data.items() if value is not None or name not in known}

    def rule_problems(self) -> Iterator[Problem]:
        """The rules between this model's fields that do not hold; overridden where there are some."""
        yield from ()

    @model_validator(mode="after")
    def _check_rules(self) -> typing.Self:
        problems = list(self.rule_problems())
        if problems:
            raise RuleError(problems)
        return self


# --- YAML -----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars (and merge keys): `no` is text, `1e-5` a number, a date is text.

    A whole number with a leading zero stays text and is then refused: octal in YAML 1.1, not so in 1.2.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own)


_TAG = "tag:yaml.org,2002:"
for _name, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    (
        "float",
        r"^(?:[-+]?(?:\.\d+|\d+\.\d*)(?:[eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN))$",
        list("-+.0123456789"),
    ),
    ("merge", r"^<<$", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)

_KNOWN_TAGS = {_TAG + name for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}


def read_yaml(text: str, source: str) -> tuple[object, dict[Loc, int]]:
    """The one document in `text` as plain data, and the 1-based line of every value in it.

    Raises InvalidDatasetError for anything but one well-formed document without duplicate keys.
    """
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        what = f"is {len(text)} characters long, at most {MAX_DOCUMENT_CHARACTERS} are read"
        raise InvalidDatasetError(source, [Problem((), what, fix="give the path of the resource file")])
    try:
        nodes = [node for node in yaml.compose_all(text, _Loader) if not _is_empty(node)]
    except yaml.YAMLError as error:
        raise InvalidDatasetError(source, [_syntax_problem(error)]) from None
    except RecursionError:
        raise InvalidDatasetError(source, [Problem((), "is nested too deeply")]) from None
    if len(nodes) != 1:
        raise InvalidDatasetError(source, [_count_problem(nodes)])
    walk = _Walk()
    try:
        walk.visit(nodes[0], ())
    except RecursionError:
        walk.problems.append(Problem((), "is nested too deeply"))
    if walk.problems:
        raise InvalidDatasetError(source, walk.problems)
    try:
        data = _Loader("").construct_document(nodes[0])
    except yaml.YAMLError as error:
        raise InvalidDatasetError(source, [_syntax_problem(error)]) from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # An explicit tag on a value that is none of its kind, such as `!!int x`.
        raise InvalidDatasetError(source, [Problem((), f"has a value that does not read: {error}")]) from None
    return data, walk.lines


def _is_empty(node: yaml.Node | None) -> bool:
    if isinstance(node, yaml.ScalarNode):
        return node.tag == _TAG + "null" and not node.value
    return node is None


def _count_problem(nodes: Sequence[yaml.Node]) -> Problem:
    if not nodes:
        return Problem((), "holds no document", fix="begin with `apiVersion: bagelplane.io/v1alpha1`")
    return Problem(
        (),
        f"holds {len(nodes)} documents, one is expected",
        line=nodes[1].start_mark.line + 1,
        fix="put each resource into a file of its own (documents are divided by `---`)",
    )


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        what = ": ".join(part for part in (error.context, error.problem) if part)
        where = f", column {mark.column + 1}" if mark else ""
        line = mark.line + 1 if mark else 0
        prefix = f"line {line}{where}: " if mark else ""
        fix = "correct the indentation, quotes or brackets there (tabs do not indent in YAML)"
        return Problem((), f"is no YAML: {prefix}{what}", fix=fix)
    return Problem((), f"is no YAML: {' '.join(str(error).split())}", fix="save it as UTF-8 text")


class _Walk:
    """Visits every node once for each place it appears in; finds what constructing would hide."""

    def __init__(self) -> None:
        self.lines: dict[Loc, int] = {}
        self.problems: list[Problem] = []
        self._count = 0
        self._open: set[int] = set()

    def visit(self, node: yaml.Node, loc: Loc) -> None:
        self._count += 1
        line = node.start_mark.line + 1
        self.lines.setdefault(loc, line)
        if self._count > MAX_DOCUMENT_NODES:
            if self._count == MAX_DOCUMENT_NODES + 1:
                self.problems.append(Problem((), f"holds more than {MAX_DOCUMENT_NODES} values"))
            return
        if node.tag not in _KNOWN_TAGS:
            fix = "remove the tag, and quote the value if it is text"
            self.problems.append(Problem(loc, "has an unknown YAML tag", got=node.tag, fix=fix, line=line))
            return
        if id(node) in self._open:
            self.problems.append(Problem(loc, "refers to itself", line=line, fix="remove the alias"))
            return
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, child in enumerate(node.value):
                self.visit(child, (*loc, index))
        elif isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, loc)
        self._open.discard(id(node))

    def _visit_mapping(self, node: yaml.MappingNode, loc: Loc) -> None:
        seen: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == _TAG + "merge":
                merged.append(value)
                continue
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TAG + "str":
                got = show(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                self.problems.append(Problem(loc, "has a key that is no text", got, "quote the key", line))
                continue
            name = str(key.value)
            if name in seen:
                what = f"appears twice, first in line {seen[name]}"
                self.problems.append(Problem((*loc, name), what, line=line, fix="keep one of the two"))
                continue
            seen[name] = line
            self.visit(value, (*loc, name))
            self.lines[*loc, name] = line
        for value in merged:
            self._visit_merge(value, loc)

    def _visit_merge(self, value: yaml.Node, loc: Loc) -> None:
        sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                self.visit(source, loc)


# --- pydantic's findings in our words -------------------------------------------------------------


def problems_of(error: ValidationError, root: type[SpecModel], lines: Mapping[Loc, int]) -> list[Problem]:
    """Every finding of `error` as a Problem, in the order of the text where lines are known."""
    found: list[Problem] = []
    findings = error.errors(include_url=False)
    for details in findings[:_MAX_FINDINGS]:
        found.extend(_translate(details, root))
    located = [
        Problem(problem.loc, problem.what, problem.got, problem.fix, _line_of(problem.loc, lines))
        for problem in found
    ]
    located.sort(key=lambda problem: problem.line)
    if len(findings) > _MAX_FINDINGS:
        located.append(Problem((), f"has {len(findings) - _MAX_FINDINGS} problems more, correct these first"))
    return located


def _line_of(loc: Loc, lines: Mapping[Loc, int]) -> int:
    """Line of the value, or of the nearest thing around it (a missing field has none of its own)."""
    while loc and loc not in lines:
        loc = loc[:-1]
    return lines.get(loc, 0)


_KINDS = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping (`key: value` lines)",
    "model_type": "must be a mapping (`key: value` lines)",
    "model_attributes_type": "must be a mapping (`key: value` lines)",
    "tuple_type": "must be a list (lines that begin with `- `)",
}


def _translate(details: ErrorDetails, root: type[SpecModel]) -> Iterator[Problem]:
    loc: Loc = tuple(details["loc"])
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, RuleError):
        for problem in cause.problems:
            yield Problem((*loc, *problem.loc), problem.what, problem.got, problem.fix)
        return
    got, fix = show(value), _example_fix(root, loc)
    if isinstance(cause, FieldValueError):
        what, fix = cause.what, cause.fix or fix
        got = "" if cause.secret else got
    elif kind == "missing":
        what, got = "is missing", ""
        fix = fix.replace("write", "add", 1) if fix else "add it"
    elif kind == "extra_forbidden":
        what, got, fix = "is no known field", "", _name_fix(root, loc)
    elif kind == "literal_error":
        what, fix = f"must be {context['expected']}", _choice_fix(str(context["expected"]), value, fix)
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        what = _bound_text(kind, context)
    elif kind == "too_short" and value:
        return  # pydantic counts the good entries alone; the bad ones are reported one by one
    elif kind == "too_short":
        what, got = "must have at least one entry", ""
    elif kind == "too_long":
        what, got = (
            f"must have at most {context['max_length']} entries",
            str(context["actual_length"] or "more"),
        )
    else:
        message = details["msg"]
        what = _KINDS.get(kind, message[:1].lower() + message[1:])
    yield Problem(loc, what, got, fix)


def _bound_text(kind: str, context: Mapping[str, Any]) -> str:
    words = {"greater_than_equal": ("at least", "ge"), "greater_than": ("greater than", "gt")}
    words |= {"less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}
    phrase, key = words[kind]
    return f"must be {phrase} {context[key]:g}" if context[key] < 1e6 else f"must be {phrase} {context[key]}"


def _example_fix(root: type[SpecModel], loc: Loc) -> str:
    info = field_at(root, loc)
    if info is None or not loc or isinstance(loc[-1], int):
        return ""
    example = info.examples[0] if info.examples else info.get_default(call_default_factory=False)
    if example is None or not isinstance(example, (str, int, float)):
        return f"see docs/reference/resource.md for what `{loc[-1]}` holds"
    return f"write for example `{loc[-1]}: {_yaml_scalar(example)}`"


def _yaml_scalar(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_fix(root: type[SpecModel], loc: Loc) -> str:
    model = model_at(root, loc[:-1])
    names = [info.alias or name for name, info in model.model_fields.items()] if model else []
    written = str(loc[-1])
    near = nearest(written.replace("_", ""), names) or nearest(written, names)
    if near:
        return f"did you mean `{near}`?"
    return f"remove it; the fields here are {', '.join(names)}" if names else "remove it"


def _choice_fix(expected: str, value: object, otherwise: str) -> str:
    choices = re.findall(r"'([^']*)'", expected)
    near = nearest(str(value), choices)
    return f"did you mean `{near}`?" if near else otherwise


def nearest(written: str, names: Sequence[str]) -> str | None:
    """The name that was probably meant: equal but for upper and lower case, or at least alike."""
    folded = {name.lower(): name for name in names}
    if written.lower() in folded:
        return folded[written.lower()]
    close = difflib.get_close_matches(written, names, n=1, cutoff=0.6)
    return close[0] if close else None


def show(value: object) -> str:
    """A value as a message shows it: short, on one line, containers by their kind only."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, (bool, float)):
        return _yaml_scalar(value)
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARACTERS else text[: _SHOWN_VALUE_CHARACTERS - 3] + "..."


def format_path(loc: Loc) -> str:
    """`("spec", "groups", 1, "weight")` as `spec.groups[1].weight`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


# --- finding a field by its path ------------------------------------------------------------------


def child_model(annotation: object) -> type[SpecModel] | None:
    """The model inside `X`, `X | None`, `tuple[X, ...]` or `dict[str, X]`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is not None:
        for part in typing.get_args(annotation):
            found = child_model(part)
            if found is not None:
                return found
    return None


def model_at(root: type[SpecModel], loc: Loc) -> type[SpecModel] | None:
    """The model whose fields stand at `loc`."""
    model: type[SpecModel] | None = root
    for part in loc:
        if isinstance(part, int):
            continue
        info = _field_named(model, part) if model else None
        model = child_model(info.annotation) if info else None
    return model


def field_at(root: type[SpecModel], loc: Loc) -> FieldInfo | None:
    """The field that `loc` names, or None."""
    names = [part for part in loc if isinstance(part, str)]
    if not names:
        return None
    model = model_at(root, tuple(names[:-1]))
    return _field_named(model, names[-1]) if model else None


def _field_named(model: type[SpecModel], name: str) -> FieldInfo | None:
    for python_name, info in model.model_fields.items():
        if name in (info.alias, python_name):
            return info
    return None
