"""The kinds of value that fields of the resource hold: addresses, quantities, names.

Each checks a value and raises FieldValueError, which says what is wrong and what to write. Opens nothing.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from bagelplane.spec_errors import FieldValueError

MAX_INT64 = 2**63 - 1  # the API server keeps integers in 64 bits

_REMOTE_SCHEMES = ("s3", "gs", "az")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def parse_quantity(value: object) -> int:
    """Bytes from a Kubernetes quantity: 1073741824, "10Gi", "1.5G". Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P|)", str(value))
    if isinstance(value, bool) or not isinstance(value, (int, str)) or match is None:
        raise FieldValueError(
            "must be a quantity of bytes", fix="write for example 512Mi, 10Gi or 1073741824"
        )
    amount = int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]
    if not 0 < amount <= MAX_INT64:
        raise FieldValueError("must be more than nothing and less than 8Ei", fix="write for example 10Gi")
    return amount


def _check_resource_quantity(value: object) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    text = str(value) if number or isinstance(value, str) else ""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTPE]i?)?", text):
        raise FieldValueError("must be a Kubernetes quantity", fix="write for example 500m, 2 or 8Gi")
    return text


def check_uri(value: str) -> str:
    """A storage address that can be opened: s3://, gs://, az://, file:///, or a local path."""
    examples = "write for example s3://bucket/folder/, file:///data/folder or data/folder"
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
    if "://" in value or not value or value != value.strip():
        raise FieldValueError("must be a local path", fix="write for example /etc/bagel-s3")
    return value


def check_endpoint(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+/?", value) or "@" in value:
        fix = (
            "write for example https://s3.example.com or http://127.0.0.1:9000, credentials go into secretRef"
        )
        raise FieldValueError(
            "must be http:// or https:// with a host and nothing after it", fix=fix, secret=True
        )
    return value


def _pattern(pattern: str, what: str, max_length: int) -> AfterValidator:
    def check(value: str) -> str:
        if len(value) > max_length or not re.fullmatch(pattern, value):
            raise FieldValueError(f"must be {what}, at most {max_length} characters")
        return value

    return AfterValidator(check)


def _check_special_token(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or value == "":
        raise FieldValueError("must be the token's text or its id")
    if isinstance(value, int) and not 0 <= value <= MAX_INT64:
        raise FieldValueError("must be an id of at least 0")
    return value


EndpointUrl = Annotated[str, AfterValidator(check_endpoint)]
LocalPath = Annotated[str, AfterValidator(check_local_path)]
Uri = Annotated[str, AfterValidator(check_uri)]
ByteQuantity = Annotated[int, BeforeValidator(parse_quantity)]
ResourceQuantity = Annotated[str, BeforeValidator(_check_resource_quantity)]
SpecialToken = Annotated[int | str, BeforeValidator(_check_special_token)]
ObjectName = Annotated[
    str, _pattern(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", "lower-case letters, digits and inner `-`", 63)
]
EntryName = Annotated[
    str, _pattern(r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?", "letters, digits and inner `-`, `_`, `.`", 63)
]
GroupType = Annotated[str, _pattern(r"[a-z][a-z0-9_]*", "lower-case letters, digits and `_`", 63)]
Text = Annotated[str, _pattern(r"[^\x00-\x1f\x7f]+", "text on one line", 1024)]
