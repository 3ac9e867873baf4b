"""Row groups and lines of any size: what is in memory is a slice of them."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagelplane.sources.conversation import read_lines
from bagelplane.sources.parquet import Column, ParquetReader
from bagelplane.storage import StorageSettings, open_storage

MEBIBYTE = 2**20

_WALK = """
import hashlib, json, sys
import pyarrow as pa
from bagelplane.sources.parquet import Column, ParquetReader
from bagelplane.storage import open_storage
path, name = sys.argv[1:]
rows = ParquetReader(open_storage(), [name]).read_row_group(path, 0)
column, lengths = Column(rows, name), []
for row in range(rows.num_rows):
    value = column[row]
    lengths.append(sum(map(len, value)) if isinstance(value, list) else len(value))
print(json.dumps([lengths, pa.default_memory_pool().max_memory()]))
"""


def walk(path: Path, column: str) -> tuple[list[int], int]:
    """Lengths of a column's values, read in a fresh process, and the most that Arrow had in memory for them."""
    done = subprocess.run(
        [sys.executable, "-c", _WALK, str(path), column],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lengths, most_bytes = json.loads(done.stdout)
    return lengths, most_bytes


def test_a_file_of_one_row_group_is_never_in_memory(tmp_path: Path) -> None:
    """160 MiB of pictures in one row group, beside texts."""
    path = tmp_path / "one.parquet"
    value = bytes(range(256)) * (4 * 1024)
    schema = pa.schema([("image", pa.binary()), ("captions", pa.string())])
    batch = pa.record_batch([[value] * 10, ["a text"] * 10], schema=schema)
    table = pa.Table.from_batches([batch] * 16)
    pq.write_table(table, path, row_group_size=1000, compression="NONE", use_dictionary=False)
    assert pq.read_metadata(path).num_row_groups == 1
    lengths, most_bytes = walk(path, "image")
    assert lengths == [len(value)] * 160
    assert most_bytes < 64 * MEBIBYTE, f"{most_bytes / MEBIBYTE:.0f} MiB"


@pytest.mark.slow
def test_lists_of_pictures_beyond_two_gibibytes_are_read(tmp_path: Path) -> None:
    """Arrow cannot make one array of them: offsets of list<binary> are of 32 bits."""
    path = tmp_path / "lists.parquet"
    schema = pa.schema([("image_list", pa.list_(pa.binary()))])
    batch = pa.record_batch([[[bytes(15 * MEBIBYTE)] * 2]], schema=schema)
    table = pa.Table.from_batches([batch] * 74)
    pq.write_table(table, path, row_group_size=1000, compression="ZSTD", use_dictionary=False)
    assert pq.read_metadata(path).row_group(0).column(0).total_uncompressed_size > 2**31
    lengths, most_bytes = walk(path, "image_list")
    assert lengths == [30 * MEBIBYTE] * 74
    assert most_bytes < 256 * MEBIBYTE, f"{most_bytes / MEBIBYTE:.0f} MiB"


def test_going_back_in_a_row_group_gives_the_same_values(tmp_path: Path) -> None:
    path = tmp_path / "back.parquet"
    values = [bytes([number]) * 1000 for number in range(100)]
    pq.write_table(pa.table({"image": values}), path, row_group_size=100)
    reader = ParquetReader(open_storage(), ["image"], slice_bytes=7000)
    rows = reader.read_row_group(str(path), 0)
    assert rows is not None
    column = Column(rows, "image")
    for row in (0, 6, 7, 3, 99, 98, 50, 49, 51, 0, 99):
        assert column[row] == values[row]


def test_lines_of_fifty_megabytes_are_read_by_ranges() -> None:
    uri = f"memory://{uuid.uuid4().hex}/train.jsonl"
    lines = ["short\n", json.dumps({"text": "x" * 50_000_000}) + "\r\n", "\n", "the last one"]
    storage = open_storage(StorageSettings(read_ahead_bytes=16 * MEBIBYTE))
    storage.write_bytes(uri, "".join(lines).encode())
    assert read_lines(storage, uri) == [line.replace("\r\n", "\n") for line in lines]
    reads = storage.costs.as_json()["requests"]["read"]
    assert reads == 6, "parts of 8 MiB"
    storage.close()
