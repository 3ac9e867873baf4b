"""Profile Strict under damage: no other sample of any pack changes, and every row drawn is accounted for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagelplane.engine.packer import PackingConfig
from bagelplane.engine.planner import PackPlanner
from bagelplane.engine.profile import AUTOMODEL, STRICT, Profile
from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import ImageLedger, Sample
from bagelplane.engine.sharding import shard_to_rank
from bagelplane.errors import DataError
from bagelplane.sources.group import StoredGroup
from bagelplane.spec import BagelDataset
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.golden.recordings import HERE, next_batch
from tests.numbered_rows import NumberedRows
from tests.property.hostile_rows import EDIT, T2I, VLM, encoded, write_parquet

pytestmark = pytest.mark.timeout(300)

# --- accounting -----------------------------------------------------------------------------------


@st.composite
def worlds(draw: st.DrawFn) -> tuple[PackingConfig, list[tuple[list[int], bool, float]]]:
    most = draw(st.integers(10, 120))
    config = PackingConfig(
        expected_tokens=draw(st.integers(1, most)),
        max_tokens=most,
        max_tokens_per_sample=draw(st.integers(2, most)),
        prefer_buffer_before=draw(st.integers(0, most + 20)),
        max_buffer_size=draw(st.integers(0, 5)),
    )
    sizes = st.lists(st.one_of(st.just(0), st.integers(2, most + 20)), min_size=1, max_size=8)
    groups = draw(
        st.lists(st.tuples(sizes, st.booleans(), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=4)
    )
    return config, groups


@pytest.mark.parametrize("profile", [AUTOMODEL, STRICT], ids=lambda profile: profile.name)
@settings(max_examples=300)
@given(world=worlds(), seed=st.integers(0, 2**32 - 1))
def test_every_row_drawn_is_packed_or_waits_or_is_counted(
    profile: Profile, world: tuple[PackingConfig, list[tuple[list[int], bool, float]]], seed: int
) -> None:
    config, parts = world
    groups = [
        NumberedRows(f"g{number}", sizes, mandatory=mandatory, weight=weight)
        for number, (sizes, mandatory, weight) in enumerate(parts)
    ]
    planner = PackPlanner(
        config=config,
        groups=groups,
        rng=StreamRandom(seed),
        images=ImageLedger(),
        profile=profile,
        max_consecutive_drops=30,
    )
    packed: list[tuple[int, int]] = []
    dropped: Counter[str] = Counter()
    ended = ""
    for _ in range(20):
        try:
            plan = planner.plan()
        except DataError as error:
            ended = str(error)
            break
        assert plan.pack.placed, "an empty pack"
        packed += [(placed.sample.group_index, placed.sample.data_indexes) for placed in plan.pack.placed]
        dropped.update(drop.group for drop in plan.drops)
        mark = plan.after
        waiting = [*mark.buffer, *([mark.carried] if mark.carried else [])]
        somewhere = packed + [(sample.group_index, sample.data_indexes) for sample in waiting]
        assert len(set(somewhere)) == len(somewhere), "a row twice"
        here = Counter(f"g{group}" for group, _ in somewhere)
        for group, drawn in zip(groups, mark.groups, strict=True):
            assert drawn == here[group.name] + dropped[group.name], group.name
        assert len(mark.buffer) <= config.max_buffer_size
        if profile is STRICT:
            assert plan.pack.length <= config.max_tokens
            assert not any(drop.reason == "buffer_full" for drop in plan.drops)
        # What waits is found again by its references.
        state = json.loads(json.dumps(planner.state_to_json(mark)))
        planner.state_from_json(state)
        assert planner.state_to_json(planner.mark()) == state
    assert not ended or profile is AUTOMODEL or "30 rows in a row dropped" in ended


# --- damage ---------------------------------------------------------------------------------------

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
T2I_ROWS, EDIT_ROWS, LINES, PACKS = 12, 6, 8, 5
IMAGES = T2I_ROWS + 3 * EDIT_ROWS + LINES


@cache
def pictures() -> list[bytes]:
    return [encoded(48 + number, 40 + number % 7, FORMATS[number % 6]) for number in range(IMAGES)]


def _pixels_begin(data: bytes) -> int:
    """Behind the header that tells the size."""
    if data[:3] == b"\xff\xd8\xff":
        return data.index(b"\xff\xda") + 14
    return {b"\x89PNG": data.find(b"IDAT") + 4, b"GIF8": 13 + 768 + 12}.get(data[:4], 64)


def damage(data: bytes, kind: str, where: float) -> bytes:
    begin, end = _pixels_begin(data), len(data)
    if data[:2] == b"II":  # a TIFF of Pillow's has its directory at the end
        begin, end = 8, data.index(b"\x00\x01\x04\x00", 8) if b"\x00\x01\x04\x00" in data[8:] else end - 200
        kind = "fill"
    at = begin + int(where * max(1, end - begin - 2))
    if kind == "cut":
        return data[:at]
    if kind == "fill":
        return data[:at] + b"\xff" * (end - at) + data[end:]
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def write_data(folder: Path, images: list[bytes]) -> BagelDataset:
    """Three groups of which each row has its own images; `images` in the order of rows."""
    stock = iter(images)
    columns: dict[str, Any] = {"image": pa.array([next(stock) for _ in range(T2I_ROWS)], pa.binary())}
    columns["captions"] = pa.array([json.dumps({"a": f"row {row}"}) for row in range(T2I_ROWS)])
    write_parquet(folder / "t2i/a.parquet", columns, row_group_size=100)
    chains = [[next(stock) for _ in range(3)] for _ in range(EDIT_ROWS)]
    columns = {
        "image_list": pa.array(chains, pa.list_(pa.binary())),
        "instruction_list": pa.array([[[f"step {row}"], ["more"]] for row in range(EDIT_ROWS)]),
    }
    write_parquet(folder / "edit/a.parquet", columns, row_group_size=100)
    (folder / "images").mkdir()
    for line in range(LINES):
        (folder / f"images/{line}").write_bytes(next(stock))
    (folder / "lines.jsonl").write_text("".join(lines()))
    place = {"name": "vlm", "uri": str(folder), "jsonl": "lines.jsonl", "images": "images"}
    spec = {
        "profile": "Strict",
        "tokenizer": {"uri": str(HERE / "data/tokenizer.json")},
        "groups": [
            {**T2I, "mandatory": True, "datasets": [{"name": "t2i", "uri": str(folder / "t2i")}]},
            {**EDIT, "datasets": [{"name": "edit", "uri": str(folder / "edit")}]},
            {**VLM, "datasets": [place]},
        ],
        "budgets": {
            "expectedTokens": 180,
            "maxTokens": 240,
            "maxTokensPerSample": 200,
            "preferBufferBefore": 60,
            "maxBufferSize": 2,
        },
        "conditioning": {"textDropout": 0.2, "vitDropout": 0.4, "vaeDropout": 0.2},
        "sharding": {"mode": "Bagel", "workersPerRank": 0},
    }
    head = {"apiVersion": "bagelplane.io/v1alpha1", "kind": "BagelDataset", "metadata": {"name": "damage"}}
    return BagelDataset.from_mapping({**head, "spec": spec})


def lines() -> list[str]:
    def turns(line: int) -> list[dict[str, str]]:
        return [{"from": "human", "value": f"{line} <image>"}, {"from": "gpt", "value": f"answer {line}"}]

    return [json.dumps({"image": str(line), "conversations": turns(line)}) + "\n" for line in range(LINES)]


@cache
def images_of_row(kind: str, index: Any) -> frozenset[int]:
    """Numbers of the images that a row of the stream has."""
    if kind == "t2i_pretrain":
        return frozenset({index[2]})
    if kind == "unified_edit":
        return frozenset(range(T2I_ROWS + 3 * index[1], T2I_ROWS + 3 * index[1] + 3))
    order, _ = shard_to_rank(
        [(line, "") for line in lines()], rng=random.Random(), epoch_seed=42, rank=0, world_size=1, group=""
    )
    line = json.loads(order[index][0])["image"]
    return frozenset({T2I_ROWS + 3 * EDIT_ROWS + int(line)})


def samples_of(batch: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """(group type, row, digest of all that a trainer gets of it, places counted from its own beginning)."""
    found = []
    start = shown = 0
    vit_row = 0
    for entry, length in zip(batch["batch_data_indexes"], batch["sample_lens"], strict=True):
        stop = start + length
        digest = hashlib.sha256()

        def add(*arrays: Any, digest: Any = digest) -> None:
            for array in arrays:
                digest.update(np.ascontiguousarray(array).tobytes())

        def inside(name: str, start: int = start, stop: int = stop) -> np.ndarray:
            indexes: np.ndarray = batch[name]
            return (indexes >= start) & (indexes < stop)

        text = inside("packed_text_indexes")
        add(batch["packed_text_ids"][text], batch["packed_text_indexes"][text] - start)
        add(batch["packed_position_ids"][start:stop])
        vae, vit = inside("packed_vae_token_indexes"), inside("packed_vit_token_indexes")
        add(batch["packed_vae_token_indexes"][vae] - start, batch["packed_latent_position_ids"][vae])
        add(batch["packed_timesteps"][vae])
        add(batch["packed_vit_tokens"][vit], batch["packed_vit_position_ids"][vit])
        loss, labels = inside("mse_loss_indexes"), inside("ce_loss_indexes")
        add(batch["mse_loss_indexes"][loss] - start, batch["ce_loss_indexes"][labels] - start)
        add(batch["packed_label_ids"][labels], batch["ce_loss_weights"][labels])
        tokens = int(vae.sum())
        while tokens > 0:
            rows, columns = batch["patchified_vae_latent_shapes"][shown]
            add(batch["padded_images"][shown, :, : rows * 16, : columns * 16])
            tokens -= rows * columns
            shown += 1
        vit_row += int(vit.sum())
        index = entry["data_indexes"]
        row = tuple(index) if isinstance(index, list) else index
        found.append((entry["dataset_name"], row, digest.hexdigest()))
        start = stop
    return found


@dataclass(frozen=True, slots=True)
class Run:
    packs: list[list[tuple[str, Any, str]]]
    state: dict[str, Any]
    drawn: int


def run(images: list[bytes], decode_threads: int = 0) -> Run:
    drawn = 0
    draw = StoredGroup.draw

    def counted(group: StoredGroup, rng: StreamRandom) -> Sample:
        nonlocal drawn
        drawn += 1
        return draw(group, rng)

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredGroup, "draw", counted)
        dataset = write_data(Path(folder), images)
        stream = open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=decode_threads)
        with contextlib.closing(stream):
            packs = []
            for _ in range(PACKS):
                batch = next_batch(stream)[1]
                assert batch["sequence_length"] <= 240
                packs.append(samples_of(batch) if batch["batch_data_indexes"] else [])
            return Run(packs, stream.state(), drawn)


@cache
def undamaged() -> Run:
    whole = run(pictures())
    assert not whole.state["drops"]
    assert {kind for pack in whole.packs for kind, _, _ in pack} == {
        "t2i_pretrain",
        "unified_edit",
        "vlm_sft",
    }
    return whole


@settings(max_examples=60)
@given(
    damages=st.dictionaries(
        st.integers(0, IMAGES - 1),
        st.tuples(st.sampled_from(["cut", "fill", "flip"]), st.floats(0, 1)),
        min_size=1,
        max_size=IMAGES,
    ),
    decode_threads=st.sampled_from([0, 2]),
)
def test_damaged_pixels_of_any_images_change_no_other_sample_of_any_pack(
    damages: dict[int, tuple[str, float]], decode_threads: int
) -> None:
    images = [
        damage(data, *damages[number]) if number in damages else data
        for number, data in enumerate(pictures())
    ]
    whole, damaged = undamaged(), run(images, decode_threads)
    for before, after in zip(whole.packs, damaged.packs, strict=True):
        rows = [(kind, row) for kind, row, _ in before]
        assert [row for row in rows if row in {(kind, row) for kind, row, _ in after}] == [
            (kind, row) for kind, row, _ in after
        ], "the order stays"
        untouched = [sample for sample in before if not images_of_row(*_key(sample)) & damages.keys()]
        assert [sample for sample in after if not images_of_row(*_key(sample)) & damages.keys()] == untouched
    gone = sum(map(len, whole.packs)) - sum(map(len, damaged.packs))
    counts = Counter[str]()
    for table in damaged.state["drops"].values():
        counts.update(table)
    assert set(counts) <= {"image_truncated", "image_undecodable"}
    assert counts.total() == gone
    states = [dict(result.state, drops={}) for result in (whole, damaged)]
    assert json.dumps(states[0]) == json.dumps(states[1]), "no draw moved"
    if decode_threads == 0:  # else packs were planned ahead
        worker = damaged.state["workers"][0]
        waiting = len(worker["buffer"]) + ("carried" in worker)
        assert damaged.drawn == sum(map(len, damaged.packs)) + counts.total() + waiting


def _key(sample: tuple[str, Any, str]) -> tuple[str, Any]:
    return sample[0], sample[1]


def test_damage_is_seen_at_all() -> None:
    images = [damage(data, "cut", 0.3) for data in pictures()]
    drops = run(images).state["drops"]
    assert drops.keys() == {"t2i", "edit", "vlm"}
