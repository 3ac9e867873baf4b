"""How an index lies in the store: names of parts, their Parquet schema, and what a value becomes in it.

An index is a folder of parts, each written once and whole. A part tells of one data object (a Parquet file), or of
some lines of one (a JSONL file). Its name says of which object it is, in which version, and how it was looked at: so
what is there and what is out of date shows from one listing. docs/reference/index-format.md describes it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import pyarrow as pa

from bagelplane.engine.profile import Profile

FORMAT = "bagelplane-index"
FORMAT_VERSION = 1
PARTS_FOLDER, INVENTORY_NAME = "parts", "inventory.parquet"
LINES_A_PART = 10_000
LINES_A_GROUP = 1_000
MAX_PART_BYTES = 256 * 1024 * 1024
UNUSABLE = (
    pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    RecursionError, MemoryError,
)  # fmt: skip
"""What reading a file may raise that is damaged, or none of an index."""
_METADATA_KEY = b"bagelplane"
_PART_NAME = re.compile(r"([0-9a-f]{20})-([0-9a-f]{20})-([0-9]{5})-of-([0-9]{5})(-verified)?\.parquet")

IMAGE_FIELDS = [
    pa.field("uri", pa.large_string()),
    pa.field("frame", pa.int32()),
    pa.field("width", pa.int32()),
    pa.field("height", pa.int32()),
    pa.field("format", pa.string()),
    pa.field("length_bytes", pa.int64()),
    pa.field("problem", pa.large_string()),
    pa.field("undecodable", pa.large_string()),
]
ROW_SCHEMA = pa.schema(
    [
        pa.field("row_group", pa.int32()),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("is_whole", pa.bool_(), nullable=False),
        pa.field("images", pa.large_list(pa.struct(IMAGE_FIELDS))),
        pa.field("images_problem", pa.large_string()),
        pa.field("text", pa.large_string()),
        pa.field("text_form", pa.string(), nullable=False),
        pa.field("token_keys", pa.large_list(pa.uint64()), nullable=False),
        pa.field("token_counts", pa.large_list(pa.uint32()), nullable=False),
        pa.field("drop_reason", pa.string()),
        pa.field("drop_message", pa.large_string()),
    ]
)
INVENTORY_SCHEMA = pa.schema(
    [
        pa.field("object", pa.large_string(), nullable=False),
        pa.field("type", pa.string(), nullable=False),
        pa.field("images_uri", pa.large_string()),
        pa.field("version", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("part", pa.string(), nullable=False),
        pa.field("row_groups", pa.large_list(pa.int64()), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("images", pa.int64(), nullable=False),
        pa.field("image_bytes", pa.int64(), nullable=False),
        pa.field("undecodable_images", pa.int64()),
        pa.field(
            "drops",
            pa.large_list(pa.struct([pa.field("reason", pa.string()), pa.field("rows", pa.int64())])),
            nullable=False,
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class IndexedObject:
    """A data object as a resource names it. `images_uri` is the folder that a JSONL file's names are joined to."""

    type: str
    uri: str
    images_uri: str = ""

    @property
    def digest(self) -> str:
        return _short_digest([self.type, self.uri, self.images_uri])


@dataclass(frozen=True, slots=True)
class Looking:
    """How rows are looked at: with another tokenizer, profile or library the answers might be others."""

    profile: str
    tokenizer: str
    """SHA-256 of its file."""
    libraries: tuple[str, ...]
    format_version: int = FORMAT_VERSION

    @staticmethod
    def here(profile: Profile, tokenizer_digest: str) -> Looking:
        """With what is installed in this process."""
        names = ("pillow", "tokenizers")
        return Looking(profile.name, tokenizer_digest, tuple(f"{n} {metadata.version(n)}" for n in names))

    def state_digest(self, version: str, size_bytes: int) -> str:
        """Names one version of an object, looked at in this way."""
        return _short_digest([asdict(self), version, size_bytes])


@dataclass(frozen=True, slots=True)
class PartName:
    """Part `number` of `count` about an object in a state."""

    object_digest: str
    state_digest: str
    number: int = 0
    count: int = 1
    is_verified: bool = False

    def __str__(self) -> str:
        place = f"{self.number:05d}-of-{self.count:05d}"
        verified = "-verified" if self.is_verified else ""
        return f"{self.object_digest}-{self.state_digest}-{place}{verified}.parquet"


def parse_part_name(name: str) -> PartName | None:
    """None for a name that we do not write."""
    match = _PART_NAME.fullmatch(name)
    if match is None or int(match[3]) >= int(match[4]):
        return None
    return PartName(match[1], match[2], int(match[3]), int(match[4]), match[5] is not None)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a part says of itself: the line of the inventory, and where its rows lie."""

    object: str
    type: str
    images_uri: str
    version: str
    size_bytes: int
    row_groups: list[int]
    """Rows of each row group of the data object; of a part about lines, the number of its lines alone."""
    images: int
    image_bytes: int
    undecodable_images: int | None
    """None where images were not decoded."""
    drops: dict[str, int]

    @property
    def rows(self) -> int:
        return sum(self.row_groups)

    def as_inventory(self, part: str) -> dict[str, Any]:
        """As a row of INVENTORY_SCHEMA."""
        fields = asdict(self)
        drops = [{"reason": reason, "rows": rows} for reason, rows in sorted(self.drops.items())]
        return {**fields, "part": part, "rows": self.rows, "drops": drops}

    @staticmethod
    def from_inventory(row: Mapping[str, Any]) -> Summary:
        """The inverse. ValueError, TypeError or KeyError for anything else."""
        fields = {name: row[name] for name in Summary.__dataclass_fields__ if name != "drops"}
        return checked(Summary(**fields, drops={drop["reason"]: drop["rows"] for drop in row["drops"]}))


def checked(summary: Summary) -> Summary:
    """ValueError for numbers that cannot be: index files come from a store, where anybody may have written them."""
    counts = [*summary.row_groups, summary.images, summary.image_bytes, summary.size_bytes]
    if any(type(count) is not int or count < 0 for count in [*counts, *summary.drops.values()]):
        raise ValueError("a count is no whole number of at least 0")
    return summary


def with_summary(table: pa.Table, summary: Summary) -> pa.Table:
    """The table as it is written: its schema carries the summary."""
    content = {"format": FORMAT, "format_version": FORMAT_VERSION, "summary": asdict(summary)}
    return table.replace_schema_metadata({_METADATA_KEY: json.dumps(content, sort_keys=True)})


def summary_of(schema: pa.Schema) -> Summary:
    """What `with_summary` wrote. ValueError, TypeError or KeyError for anything else."""
    if schema.remove_metadata() != ROW_SCHEMA:
        raise ValueError("its columns are not those of an index")
    content = json.loads((schema.metadata or {})[_METADATA_KEY])
    if (content["format"], content["format_version"]) != (FORMAT, FORMAT_VERSION):
        raise ValueError("it has another format or version")
    return checked(Summary(**content["summary"]))


def text_key(text: str) -> int:
    """Names a text among those of its row."""
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def form_of(value: Any) -> tuple[str, str | None]:
    """A value as (text_form, text). ValueError for one that only the data can give."""
    if value is None:
        return "null", None
    if isinstance(value, str) and is_unicode(value):
        return "text", value
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode("ascii")
    if not _is_plain(value):
        raise ValueError(f"a {type(value).__name__} is not kept in an index")
    return "json", json.dumps(value)


def value_of(form: str, text: str | None) -> Any:
    """The inverse. ValueError: what the row itself raised ("error"), or a form that there is not."""
    if form == "null":
        return None
    if text is None:
        raise ValueError(f"a row of the index has the form {form!r} and no text")
    if form == "text":
        return text
    if form == "json":
        return json.loads(text)
    if form == "bytes":
        return base64.b64decode(text, validate=True)
    raise ValueError(text if form == "error" else f"a row of the index has the form {form!r}")


def is_unicode(text: str) -> bool:
    """Whether Parquet can hold it: a half of a surrogate pair it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    """Whether JSON gives back just this."""
    if type(value) is list:
        return all(_is_plain(entry) for entry in value)
    if type(value) is dict:
        return all(type(key) is str and _is_plain(entry) for key, entry in value.items())
    return value is None or type(value) in (str, int, float, bool)


def _short_digest(parts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]
