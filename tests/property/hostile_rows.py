"""Strategies for rows as no one should write them, and what a stream may answer to them."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from PIL import Image

from bagelplane.engine.drops import DropReason
from bagelplane.errors import BagelplaneError
from bagelplane.spec import BagelDataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.broken_images import broken_webp
from tests.golden.recordings import HERE, next_batch

DEADLINE_SECONDS = 20.0
PACKS = 3
REASONS = set(DropReason)


def encoded(width: int, height: int, file_format: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    pixels = np.random.RandomState(width * 31 + height).randint(0, 255, (height, width, 4), np.uint8)
    Image.fromarray(pixels).convert(mode).save(out, file_format)
    return out.getvalue()


GOOD_IMAGES = [
    encoded(40, 30),
    encoded(64, 20, "JPEG"),
    encoded(30, 50, "WEBP"),
    encoded(33, 33, "PNG", "LA"),
]
ODD_IMAGES = [
    b"", b"\0", b"no image", encoded(1, 1), encoded(1, 300), encoded(600, 1, "JPEG"),
    encoded(40, 30)[:60], encoded(64, 20, "JPEG")[:200], broken_webp(40, 24), b"\x89PNG\r\n\x1a\n" + b"\xff" * 64,
    b"RIFF\xff\xff\xff\xffWEBPVP8 ", b"GIF89a\0\0\0\0\0\0\0", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
]  # fmt: skip
images = st.one_of(
    st.sampled_from(GOOD_IMAGES), st.sampled_from(ODD_IMAGES), st.none(), st.binary(max_size=40)
)

words = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
surrogates = st.sampled_from(
    ["\ud800", "a\udfffb", "\udc80\ud800", "\0", "\u202e", "<image>", "<|im_end|>", "😀" * 5]
)
texts = st.one_of(words, surrogates, st.just("long words " * 300))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), texts
)  # floats: nan and infinities, which Python's JSON takes
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
    max_leaves=6,
)


def json_texts(objects: Any) -> Any:
    """`objects` as JSON, sometimes cut short or with rubbish about it."""
    whole = st.builds(
        lambda value, ascii_only: json.dumps(value, ensure_ascii=ascii_only), objects, st.booleans()
    )
    return st.one_of(
        whole,
        st.builds(lambda text, keep: text[:keep], whole, st.integers(0, 30)),
        st.sampled_from(
            ["", " ", "null", "[" * 3000, '{"a": NaN}', "\ufeff{}", "{'a': 1}", '{"a": "\\ud800"}', "1e999"]
        ),
    )


captions = json_texts(st.one_of(st.dictionaries(words, texts, max_size=3), values))


def run_stream(
    folder: Path, group: dict[str, Any], profile: str = "Automodel", **budgets: int
) -> tuple[int, dict[str, dict[str, int]], str]:
    """Packs made, drops counted, and the error that ended it, if any.

    Anything but our own errors goes up, and so does a stream that neither makes a pack nor ends in time.
    """
    dataset = BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "hostile"},
            "spec": {
                "profile": profile,
                "tokenizer": {"uri": str(HERE / "data/tokenizer.json")},
                "groups": [group],
                "budgets": {
                    "expectedTokens": 200,
                    "maxTokens": 320,
                    "maxTokensPerSample": 300,
                    "preferBufferBefore": 60,
                    "maxBufferSize": 2,
                    "attention": "Flex",
                    "flexBlockSize": 1,
                    **budgets,
                },
                "sharding": {"mode": "Bagel", "workersPerRank": 0},
                "drops": {"maxConsecutive": 25},
            },
        }
    )
    begun, made, drops, ended = time.monotonic(), 0, {}, ""
    try:
        with contextlib.closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=0)) as stream:
            for _ in range(PACKS):
                pack, batch = next_batch(stream)
                json.dumps(pack.state)
                check_batch(batch)
                made, drops = made + 1, pack.state["drops"]
    except BagelplaneError as error:
        ended = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    assert seconds < DEADLINE_SECONDS, f"{made} packs in {seconds:.0f} s; drops so far: {drops}"
    assert ended.isprintable(), "a message of more than one line"
    assert {reason for reasons in drops.values() for reason in reasons} <= REASONS
    return made, drops, ended


def check_batch(batch: dict[str, Any]) -> None:
    """A pack holds together: every index is inside, every length agrees."""
    length = batch["sequence_length"]
    assert sum(batch["sample_lens"]) == 320
    for name, array in batch.items():
        if name.endswith("indexes") and isinstance(array, np.ndarray):
            assert array.size == 0 or (array.min() >= 0 and array.max() < length), name
    if "packed_label_ids" in batch:
        assert (
            len(batch["packed_label_ids"]) == len(batch["ce_loss_indexes"]) == len(batch["ce_loss_weights"])
        )
    if "padded_images" in batch:
        assert np.isfinite(batch["padded_images"]).all()
    assert len(batch["packed_text_ids"]) == len(batch["packed_text_indexes"])


def write_parquet(path: Path, columns: dict[str, pa.Array], row_group_size: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


T2I = {
    "name": "t2i",
    "type": "t2i_pretrain",
    "imageTransform": {"stride": 16, "maxSize": 96, "minSize": 16},
}
EDIT = {
    "name": "edit",
    "type": "unified_edit",
    "imageTransform": {"stride": 16, "maxSize": 96, "minSize": 16},
    "vitImageTransform": {"stride": 14, "maxSize": 56, "minSize": 14},
}
VLM = {
    "name": "vlm",
    "type": "vlm_sft",
    "imageTransform": {"stride": 14, "maxSize": 56, "minSize": 14},
}
