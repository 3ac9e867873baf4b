"""The kinds of value that fields of the resource hold: addresses, quantities, names.

Each checks a value and raises FieldValueError, which says what is wrong and what to write. Opens nothing.

Beside the check stands what the API server checks by itself (`WithJsonSchema`, see spec_schema). It refuses
nothing that the check accepts, and leaves to it what patterns say badly: `..` in keys, sizes of 0Gi.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from bagelplane.spec_errors import FieldValueError

MAX_INT64 = 2**63 - 1  # the API server keeps integers in 64 bits
MAX_ADDRESS_CHARACTERS = 2048  # S3 takes keys of 1024 bytes
MAX_QUANTITY_CHARACTERS = 32
MAX_TOKEN_CHARACTERS = 256

_REMOTE_SCHEMES = ("s3", "gs", "az")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}

_BYTES = r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTPE]i?)?"
_ENDPOINT = r"https?://[A-Za-z0-9._:\[\]-]+/?"
# No control characters, and no blanks around it.
_ADDRESS = r"[^\x00-\x20\x7f]([^\x00-\x1f\x7f]*[^\x00-\x20\x7f])?"


def parse_quantity(value: object) -> int:
    """Bytes from a Kubernetes quantity: 1073741824, "10Gi", "1.5G". Raises ValueError."""
    match = re.fullmatch(_BYTES, str(value))
    if isinstance(value, bool) or not isinstance(value, (int, str)) or match is None:
        raise FieldValueError(
            "must be a quantity of bytes", fix="write for example 512Mi, 10Gi or 1073741824"
        )
    amount = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if not 0 < amount <= MAX_INT64:
        raise FieldValueError("must be more than nothing and less than 8Ei", fix="write for example 10Gi")
    return amount


def _check_resource_quantity(value: object) -> object:
    if isinstance(value, float):  # which the API server takes in a pod, and in no resource of other kinds
        raise FieldValueError(
            "must be a Kubernetes quantity", fix=f'quote it, as in "{value}", or write 500m'
        )
    whole = isinstance(value, int) and not isinstance(value, bool) and value <= MAX_INT64
    text = str(value) if whole or isinstance(value, str) else ""
    if len(text) > MAX_QUANTITY_CHARACTERS or not re.fullmatch(_QUANTITY, text):
        raise FieldValueError("must be a Kubernetes quantity", fix="write for example 500m, 2 or 8Gi")
    return text


def check_uri(value: str) -> str:
    """A storage address that can be opened: s3://, gs://, az://, file:///, or a local path."""
    examples = "write for example s3://bucket/folder/, file:///data/folder or data/folder"
    _check_length(value, MAX_ADDRESS_CHARACTERS)
    if not value or value != value.strip() or re.search(r"[\x00-\x1f\x7f]", value):
        fix = f"remove blanks and control characters around it; {examples}"
        raise FieldValueError("must be an address without surrounding blanks", fix=fix)
    scheme, separator, rest = value.partition("://")
    if not separator:
        if re.match(r"(?i)(s3|gs|az|file):", value):
            raise FieldValueError("has its slashes missing", fix=f"a scheme ends with `://`; {examples}")
        return value
    if scheme == "file":
        if not rest.startswith("/"):
            raise FieldValueError("must name an absolute path", fix="write three slashes, as in file:///data")
        return value
    if scheme not in _REMOTE_SCHEMES:
        schemes = ", ".join((*_REMOTE_SCHEMES, "file"))
        raise FieldValueError(f"must begin with one of the schemes {schemes}, or be a path", fix=examples)
    bucket, _, key = rest.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", bucket):
        raise FieldValueError("must name a bucket after the scheme", fix=examples)
    if ".." in key.split("/"):
        raise FieldValueError(
            "must not go up with `..`", fix="object keys have no parent folders; write the key out"
        )
    return value


def check_local_path(value: str) -> str:
    """A folder on this machine."""
    _check_length(value, MAX_ADDRESS_CHARACTERS)
    if "://" in value or not value or value != value.strip():
        raise FieldValueError("must be a local path", fix="write for example /etc/bagel-s3")
    return value


def check_endpoint(value: str) -> str:
    """Address of a server: no path, no query, no credentials."""
    if len(value) > MAX_ADDRESS_CHARACTERS or not re.fullmatch(_ENDPOINT, value):
        fix = (
            "write for example https://s3.example.com or http://127.0.0.1:9000, credentials go into secretRef"
        )
        raise FieldValueError(
            "must be http:// or https:// with a host and nothing after it", fix=fix, secret=True
        )
    return value


def _check_length(value: str, most: int) -> None:
    if len(value) > most:
        raise FieldValueError(f"must have at most {most} characters", fix=f"shorten it, it has {len(value)}")


def _check_special_token(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise FieldValueError("must be the token's text or its id")
    if isinstance(value, int) and not 0 <= value <= MAX_INT64:
        raise FieldValueError("must be an id of at least 0")
    if isinstance(value, str):
        _check_length(value, MAX_TOKEN_CHARACTERS)
    return value


@dataclass(frozen=True, slots=True)
class TextPattern:
    """Text that matches a pattern as a whole."""

    pattern: str
    what: str
    max_length: int

    def __call__(self, value: str) -> str:
        if len(value) > self.max_length or not re.fullmatch(self.pattern, value):
            raise FieldValueError(f"must be {self.what}, at most {self.max_length} characters")
        return value

    def json_schema(self) -> dict[str, Any]:
        return _text_schema(self.pattern, self.max_length)


def _text_schema(pattern: str, max_length: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": max_length, "pattern": f"^(?:{pattern})$"}


def _pattern(pattern: str, what: str, max_length: int) -> AfterValidator:
    return AfterValidator(TextPattern(pattern, what, max_length))


def _int_or_string(minimum: int, max_length: int, pattern: str = "") -> WithJsonSchema:
    schema = {"x-kubernetes-int-or-string": True, "minimum": minimum, "minLength": 1, "maxLength": max_length}
    return WithJsonSchema(schema | ({"pattern": f"^(?:{pattern})$"} if pattern else {}))


EndpointUrl = Annotated[
    str,
    AfterValidator(check_endpoint),
    WithJsonSchema(_text_schema(_ENDPOINT, MAX_ADDRESS_CHARACTERS)),
]
LocalPath = Annotated[
    str,
    AfterValidator(check_local_path),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_ADDRESS_CHARACTERS}),
]
Uri = Annotated[
    str, AfterValidator(check_uri), WithJsonSchema(_text_schema(_ADDRESS, MAX_ADDRESS_CHARACTERS))
]
ByteQuantity = Annotated[
    int, BeforeValidator(parse_quantity), _int_or_string(1, MAX_QUANTITY_CHARACTERS, _BYTES)
]
ResourceQuantity = Annotated[
    str, BeforeValidator(_check_resource_quantity), _int_or_string(0, MAX_QUANTITY_CHARACTERS, _QUANTITY)
]
SpecialToken = Annotated[
    int | str, BeforeValidator(_check_special_token), _int_or_string(0, MAX_TOKEN_CHARACTERS)
]
ObjectName = Annotated[
    str, _pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "lower-case letters, digits and inner `-`", 63)
]
EntryName = Annotated[
    str, _pattern(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?", "letters, digits and inner `-`, `_`, `.`", 63)
]
GroupType = Annotated[str, _pattern(r"[a-z][a-z0-9_]*", "lower-case letters, digits and `_`", 63)]
Text = Annotated[str, _pattern(r"[^\x00-\x1f\x7f]+", "text on one line", 1024)]
