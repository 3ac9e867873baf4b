"""The `odd` data with every sixth image replaced by one that opens and does not decode, and what the peer makes of it.

    python tests/golden/broken_images.py        # in the peer's environment: writes fixtures/peer/broken_images.json

Images are chosen by a checksum of their bytes, so every environment makes the same data; the broken ones say the
size of those that they replace, so that rows plan as before until a pixel is asked for.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent / "fixtures" / "peer" / "broken_images.json"
STREAMS = {"odd_default": 16, "odd_tight": 40, "odd_buffer": 30, "extra/odd_workers": 12, "extra/frames": 20}
"""Recordings whose configurations are used, and how many packs of each rank are recorded."""

ONE_OF_IMAGES = 6
ONE_OF_FRAMES = 40  # one bad frame drops its whole row


def make_data(target: Path) -> Path:
    """Write the data set into the new folder `target`."""
    import pyarrow.parquet as pq

    shutil.copytree(HERE / "odd", target)
    for path in sorted((target / "t2i").glob("*.parquet")):
        _rewrite(path, pq.ParquetFile(path), lambda row: {**row, "image": _maybe_broken(row["image"])})
    for path in sorted((target / "edit").glob("*.parquet")):
        _rewrite(path, pq.ParquetFile(path), _with_broken_list)
    for path in sorted((target / "vlm/images").rglob("*")):
        if path.is_file():
            one_of = ONE_OF_IMAGES if path.parent.name == "images" else ONE_OF_FRAMES
            path.write_bytes(_maybe_broken(path.read_bytes(), one_of) or b"")
    return target


def _with_broken_list(row: dict[str, Any]) -> dict[str, Any]:
    images = row["image_list"]
    return {**row, "image_list": images and [_maybe_broken(image) for image in images]}


def _rewrite(path: Path, file: Any, change: Any) -> None:
    """The same row groups, changed row by row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    groups = [file.read_row_group(number) for number in range(file.num_row_groups)]
    file.close(force=True)
    with pq.ParquetWriter(path, groups[0].schema) as writer:
        for group in groups:
            rows = [change(row) for row in group.to_pylist()]
            writer.write_table(pa.Table.from_pylist(rows, schema=group.schema))


def _maybe_broken(data: bytes | None, one_of: int = ONE_OF_IMAGES) -> bytes | None:
    from PIL import Image

    if not data or zlib.crc32(data) % one_of:
        return data
    try:
        size = Image.open(io.BytesIO(data)).size
    except OSError:
        return data
    return broken_webp(*size)


def broken_webp(width: int, height: int) -> bytes:
    """A WebP of that size whose header is right and whose pixels are not."""
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (width, height), (90, 120, 30)).save(out, "WEBP", quality=1)
    whole = out.getvalue()
    return whole[:30] + b"\xff" * (len(whole) - 30)


def config_of(name: str) -> dict[str, Any]:
    folder, _, stem = name.rpartition("/")
    config: dict[str, Any] = json.loads((HERE / folder / f"stream_{stem}.json").read_text())["config"]
    return {**config, "packs": STREAMS[name]}


def main() -> None:
    from record import record

    with tempfile.TemporaryDirectory() as folder:
        data = make_data(Path(folder) / "broken")
        streams = {name: record(config_of(name), data) for name in STREAMS}
    FIXTURE.write_text(json.dumps(streams, separators=(",", ":")) + "\n")
    print(FIXTURE.name, FIXTURE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
