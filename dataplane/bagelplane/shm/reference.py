"""The tables of docs/reference/ring.md, from the definitions that the code itself uses.

python -m bagelplane.shm.reference docs/reference/ring.md      # writes them into the page
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from bagelplane.shm.record import META_FIELDS, PREFIX_FIELDS
from bagelplane.shm.ring import HEADER_FIELDS, RECORD_FIELDS

_TABLE = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def struct_table(fields: Iterable[tuple[str, str, str]]) -> str:
    """A little-endian structure as a Markdown table with byte offsets."""
    lines = ["| offset | bytes | `struct` | field | meaning |", "|---|---|---|---|---|"]
    offset = 0
    for name, code, meaning in fields:
        size = struct.calcsize("<" + code)
        lines.append(f"| {offset} | {size} | `<{code}` | {name} | {meaning} |")
        offset += size
    return "\n".join([*lines, ""])


def map_table(fields: Iterable[tuple[str, str, str]]) -> str:
    """The keys of a msgpack map as a Markdown table."""
    lines = ["| key | type | meaning |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {kind} | {meaning} |" for name, kind, meaning in fields), ""])


def with_tables(page: str) -> str:
    """The page with every `<!-- table: NAME -->` ... `<!-- end -->` filled anew."""
    tables = {
        "file-header": struct_table(HEADER_FIELDS),
        "record-header": struct_table(RECORD_FIELDS),
        "pack-prefix": struct_table(PREFIX_FIELDS),
        "pack-meta": map_table(META_FIELDS),
    }
    return _TABLE.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
