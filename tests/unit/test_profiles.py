"""Each line of the table of profile Strict against Automodel, the two side by side over the same data."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from bagelplane.engine.drops import DropReason
from bagelplane.engine.packer import PackingConfig
from bagelplane.engine.planner import PackPlanner
from bagelplane.engine.profile import AUTOMODEL, STRICT, Profile
from bagelplane.engine.rng import StreamRandom
from bagelplane.engine.samples import ImageLedger
from bagelplane.errors import BagelplaneError, DataError
from bagelplane.spec import BagelDataset
from bagelplane.spec_memory import largest_pack_bytes
from bagelplane.storage import open_storage
from bagelplane.stream import open_rank_stream, source_looks
from bagelplane.topology import Topology
from tests.golden.broken_images import broken_webp
from tests.golden.recordings import HERE, next_batch
from tests.numbered_rows import NumberedRows
from tests.property.hostile_rows import EDIT, T2I, VLM, encoded, write_parquet

BOTH = (AUTOMODEL, STRICT)
GOOD = encoded(40, 30)
BUDGETS = {
    "expectedTokens": 60,
    "maxTokens": 320,
    "maxTokensPerSample": 300,
    "preferBufferBefore": 60,
    "maxBufferSize": 2,
}


def planned(profile: Profile, groups: list[NumberedRows], packs: int = 30, **budgets: int) -> Any:
    """Lengths of packs, (group, row) of every sample in them, drop reasons, and the planner."""
    config = replace(
        PackingConfig(
            expected_tokens=80,
            max_tokens=100,
            max_tokens_per_sample=60,
            prefer_buffer_before=40,
            max_buffer_size=0,
        ),
        **budgets,
    )
    planner = PackPlanner(
        config=config,
        groups=groups,
        rng=StreamRandom(3),
        images=ImageLedger(),
        profile=profile,
        max_consecutive_drops=20,
    )
    lengths, samples, drops = [], [], Counter[str]()
    for _ in range(packs):
        plan = planner.plan()
        lengths.append(plan.pack.length)
        samples += [(placed.sample.group_index, placed.sample.data_indexes) for placed in plan.pack.placed]
        drops.update(drop.reason for drop in plan.drops)
    return lengths, samples, drops, planner


def dataset_of(profile: Profile, group: dict[str, Any], **parts: Any) -> BagelDataset:
    spec = {
        "profile": profile.name,
        "tokenizer": {"uri": str(HERE / "data/tokenizer.json")},
        "groups": [group],
        "budgets": BUDGETS,
        "conditioning": {"textDropout": 0, "vitDropout": 0, "vaeDropout": 0},
        "sharding": {"mode": "Bagel", "workersPerRank": 0},
        "drops": {"maxConsecutive": 12},
        **parts,
    }
    return BagelDataset.from_mapping(
        {
            "apiVersion": "bagelplane.io/v1alpha1",
            "kind": "BagelDataset",
            "metadata": {"name": "profiles"},
            "spec": spec,
        }
    )


def made(dataset: BagelDataset, packs: int = 2) -> tuple[list[dict[str, Any]], dict[str, int], str]:
    """Batches, drops by reason, and the error that ended it."""
    batches, drops, error = [], {}, ""
    with contextlib.closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=0)) as stream:
        try:
            for _ in range(packs):
                pack, batch = next_batch(stream)
                batches.append(batch)
                [*drops] = [pack.state["drops"]]
        except BagelplaneError as caught:
            error = str(caught)
    reasons = Counter[str]()
    for table in drops:
        for row in table.values():
            reasons.update(row)
    return batches, dict(reasons), error


def t2i(folder: Path, images: Any, captions: Any, kind: Any = None) -> dict[str, Any]:
    columns = {"image": pa.array(images, kind or pa.binary()), "captions": captions}
    write_parquet(folder / "t2i/a.parquet", columns)
    return {**T2I, "datasets": [{"name": "t2i", "uri": str(folder / "t2i")}]}


def captioned(folder: Path, images: list[bytes]) -> dict[str, Any]:
    return t2i(folder, images, pa.array(['{"a": "a picture"}'] * len(images)))


def edit(folder: Path, images: Any, instructions: Any) -> dict[str, Any]:
    write_parquet(folder / "edit/a.parquet", {"image_list": images, "instruction_list": instructions})
    return {**EDIT, "datasets": [{"name": "edit", "uri": str(folder / "edit")}]}


def vlm(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    (folder / "vlm/images").mkdir(parents=True)
    (folder / "vlm/images/good.png").write_bytes(GOOD)
    (folder / "vlm/outside.png").write_bytes(GOOD)
    (folder / "vlm/lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = {"name": "vlm", "uri": str(folder / "vlm"), "jsonl": "lines.jsonl", "images": "images"}
    return {**VLM, "datasets": [place]}


def asked(question: str, **row: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "an answer"}]
    return {**row, "conversations": turns}


GOOD_LINE = asked("what is <image>", image="good.png")


def unpadded(batch: dict[str, Any]) -> np.ndarray:
    """Of the first VAE image: 0..255, [h, w, 3]."""
    rows, columns = batch["patchified_vae_latent_shapes"][0]
    pixels = batch["padded_images"][0, :, : rows * 16, : columns * 16]
    whole: np.ndarray = np.round((pixels * 0.5 + 0.5) * 255).astype(int).transpose(1, 2, 0)
    return whole


# --- packing --------------------------------------------------------------------------------------


def test_what_does_not_fit_beside_a_full_buffer_is_lost_or_opens_the_next_pack() -> None:
    for profile in BOTH:
        _, samples, drops, planner = planned(profile, [NumberedRows("a", [30, 45, 55])])
        drawn = planner.mark().groups[0]
        carried = planner.mark().carried
        if profile is AUTOMODEL:
            assert drops[DropReason.BUFFER_FULL] > 5
            assert drawn == len(samples) + drops[DropReason.BUFFER_FULL]
        else:
            assert not drops
            assert drawn == len(samples) + (carried is not None)
            assert samples == [(0, row) for row in range(len(samples))], "in order, none twice"


def test_a_carried_sample_survives_the_state() -> None:
    _, _, _, planner = planned(STRICT, [NumberedRows("a", [55])], packs=3)
    state = json.loads(json.dumps(planner.state_to_json(planner.mark())))
    assert state["carried"] == {"group": 0, "row": {"row": 3}}
    _, _, _, other = planned(STRICT, [NumberedRows("a", [55])], packs=0)
    other.state_from_json(state)
    assert other.state_to_json(other.mark()) == state
    assert [placed.sample.data_indexes for placed in other.plan().pack.placed] == [3]


def test_mandatory_samples_overflow_a_pack_or_never() -> None:
    for profile in BOTH:
        groups = [NumberedRows(name, [55], mandatory=True) for name in "abc"]
        lengths, samples, drops, planner = planned(profile, groups, max_buffer_size=4)
        if profile is AUTOMODEL:
            assert max(lengths) > 100
        else:
            assert max(lengths) <= 100
            assert not drops
            mark = planner.mark()
            waiting = len(mark.buffer) + (mark.carried is not None)
            assert sum(mark.groups) == len(samples) + waiting
            assert waiting <= 5
            counts = Counter(group for group, _ in samples)
            assert min(counts.values()) >= 5, "each mandatory group is served in its turn"


def test_mandatory_samples_have_to_be_below_the_limit_or_at_most_at_it() -> None:
    for profile in BOTH:
        with contextlib.suppress(DataError):
            _, _, drops, _ = planned(profile, [NumberedRows("a", [60], mandatory=True)], packs=4)
            assert profile is STRICT
            assert not drops
    with pytest.raises(DataError, match="overlength_mandatory_sample"):
        planned(AUTOMODEL, [NumberedRows("a", [60], mandatory=True)])
    for profile in BOTH:
        with pytest.raises(DataError, match="overlength_mandatory_sample"):
            planned(profile, [NumberedRows("a", [61], mandatory=True)])
        with pytest.raises(DataError, match="overlength_sample"):
            planned(profile, [NumberedRows("a", [61])])


def test_room_for_overflowing_mandatory_samples_is_kept_where_they_may(tmp_path: Path) -> None:
    group = {**captioned(tmp_path, [GOOD]), "mandatory": True}
    sizes = [largest_pack_bytes(dataset_of(profile, group)) for profile in BOTH]
    assert sizes[0] > sizes[1]


@pytest.mark.parametrize("buffer", [8, 50])
def test_packs_where_nothing_is_lost_are_at_least_as_full(buffer: int) -> None:
    draws = random.Random(1)
    sizes = [draws.randint(5, 60) for _ in range(200)]
    fill, lost = {}, {}
    for profile in BOTH:
        lengths, _, drops, _ = planned(profile, [NumberedRows("a", sizes)], packs=400, max_buffer_size=buffer)
        fill[profile.name], lost[profile.name] = sum(lengths) / len(lengths), drops.total()
    assert fill["Strict"] >= fill["Automodel"], (fill, lost)
    assert lost["Strict"] == 0


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["Flex", "DenseMasks"])
def test_keys_of_an_empty_kind_are_absent_or_there_with_type_and_rank(tmp_path: Path, attention: str) -> None:
    kinds = {
        "t2i": captioned(tmp_path, [GOOD] * 2),
        "edit": edit(
            tmp_path,
            pa.array([[GOOD, GOOD]], pa.list_(pa.binary())),
            pa.array([[["brighter"]]], pa.list_(pa.list_(pa.string()))),
        ),
        "vlm": vlm(tmp_path, GOOD_LINE),
    }
    batches: dict[str, dict[str, dict[str, Any]]] = {}
    for profile in BOTH:
        for name, group in kinds.items():
            dataset = dataset_of(
                profile, group, budgets={**BUDGETS, "attention": attention, "flexBlockSize": 1}
            )
            batches.setdefault(profile.name, {})[name] = made(dataset)[0][0]
    assert len({tuple(batch) for batch in batches["Automodel"].values()}) == 3
    assert len({tuple(batch) for batch in batches["Strict"].values()}) == 1
    forms: dict[str, set[Any]] = {}
    for batch in batches["Strict"].values():
        for key, value in batch.items():
            is_array = isinstance(value, np.ndarray)
            forms.setdefault(key, set()).add((value.dtype, value.ndim) if is_array else type(value))
    assert all(len(form) == 1 for form in forms.values()), forms
    assert batches["Strict"]["vlm"]["padded_images"].shape == (0, 3, 0, 0)
    assert batches["Strict"]["t2i"]["packed_vit_tokens"].shape == (0, 14 * 14 * 3)
    for name, batch in batches["Automodel"].items():
        assert list(batch) == [key for key in batches["Strict"][name] if key in batch], "the same order"


# --- images ---------------------------------------------------------------------------------------


def saved(image: Image.Image, file_format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def test_exif_orientation_is_ignored_or_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(Image.new("RGB", (64, 32), (200, 0, 0)), "JPEG", exif=exif)
    for profile in BOTH:
        [batch, *_], drops, _ = made(dataset_of(profile, captioned(tmp_path / profile.name, [data])))
        assert batch["patchified_vae_latent_shapes"][0] == ((2, 4) if profile is AUTOMODEL else (4, 2))
        assert not drops


@pytest.mark.parametrize("kind", ["16 bit", "float"])
def test_deep_grey_is_clipped_to_white_or_scaled(tmp_path: Path, kind: str) -> None:
    if kind == "16 bit":
        data = saved(Image.fromarray(np.full((32, 32), 0x4000, np.uint16)), "PNG")
    else:
        data = saved(Image.fromarray(np.full((32, 32), 16384.0, np.float32)), "TIFF")
    for profile in BOTH:
        [batch, *_], _, _ = made(dataset_of(profile, captioned(tmp_path / profile.name, [data])))
        assert np.unique(unpadded(batch)).tolist() == [255 if profile is AUTOMODEL else 64]


def test_grey_with_alpha_is_laid_on_black_or_white(tmp_path: Path) -> None:
    data = saved(Image.new("LA", (32, 32), (0, 0)), "PNG")
    for profile in BOTH:
        [batch, *_], _, _ = made(dataset_of(profile, captioned(tmp_path / profile.name, [data])))
        assert np.unique(unpadded(batch)).tolist() == [0 if profile is AUTOMODEL else 255]


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "GIF"])
def test_truncated_pixels_are_trained_on_grey_or_dropped(tmp_path: Path, file_format: str) -> None:
    whole = encoded(96, 96, file_format)
    images = [whole[: len(whole) // 3], GOOD]
    for profile in BOTH:
        dataset = dataset_of(profile, captioned(tmp_path / profile.name, images))
        batches, drops, error = made(dataset, packs=3)
        assert not error
        rows = {entry["data_indexes"][2] for batch in batches for entry in batch["batch_data_indexes"]}
        if profile is STRICT:
            assert drops.keys() == {DropReason.IMAGE_TRUNCATED}
            assert rows == {1}
        elif file_format == "JPEG":
            assert not drops
            assert rows == {0, 1}


def test_a_truncated_webp_and_one_whose_pixels_are_damaged_have_their_own_reasons(tmp_path: Path) -> None:
    whole = encoded(96, 96, "WEBP")
    images = [whole[: len(whole) // 3], broken_webp(64, 48), GOOD]
    _, drops, _ = made(dataset_of(STRICT, captioned(tmp_path, images)), packs=2)
    assert drops.keys() == {DropReason.IMAGE_TRUNCATED, DropReason.IMAGE_UNDECODABLE}


def test_an_image_that_opens_and_does_not_decode_moves_the_stream_or_only_leaves_its_pack(
    tmp_path: Path,
) -> None:
    images = [encoded(40 + 2 * row, 30) for row in range(8)]
    broken = [broken_webp(46, 30) if row == 3 else data for row, data in enumerate(images)]
    for profile in BOTH:
        outcomes = []
        for name, data in (("good", images), ("broken", broken)):
            group = captioned(tmp_path / profile.name / name, data)
            batches, drops, _ = made(dataset_of(profile, group), packs=8)
            outcomes.append([batch["batch_data_indexes"] for batch in batches])
        left = [[entry for entry in pack if entry["data_indexes"] != [0, 1, 1]] for pack in outcomes[0]]
        assert (left == outcomes[1]) == (profile is STRICT)
        reason = DropReason.T2I_IMAGE_PARSE if profile is AUTOMODEL else DropReason.IMAGE_UNDECODABLE
        assert drops.keys() == {reason}


def test_a_pack_that_loses_all_its_samples_is_one_text_of_nothing(tmp_path: Path) -> None:
    group = captioned(tmp_path, [broken_webp(320, 320), GOOD])
    group["imageTransform"] = {"stride": 16, "maxSize": 256, "minSize": 16}
    budgets = {"expectedTokens": 200, "maxTokens": 320, "maxTokensPerSample": 300, "preferBufferBefore": 0}
    batches, drops, error = made(dataset_of(STRICT, group, budgets=budgets), packs=2)
    assert not error
    [batch] = [batch for batch in batches if batch["sequence_length"] == 2]
    assert batch["packed_text_ids"].shape == (2,)
    assert batch["sample_lens"] == [2]
    assert batch["packed_position_ids"].tolist() == [0, 1]
    assert batch["batch_data_indexes"] == []
    assert (
        batch["packed_label_ids"].size == batch["ce_loss_indexes"].size == batch["mse_loss_indexes"].size == 0
    )
    assert batch["nested_attention_masks"][0].shape == (2, 2)
    assert drops[DropReason.IMAGE_UNDECODABLE] >= 1


def test_large_images_are_decoded_or_refused_from_the_header(tmp_path: Path) -> None:
    images = [encoded(100, 100), GOOD]
    for profile in BOTH:
        group = captioned(tmp_path / profile.name, images)
        _, drops, _ = made(dataset_of(profile, group, images={"maxPixels": 9_999}))
        assert (DropReason.IMAGE_TOO_LARGE in drops) == (profile is STRICT)
        _, drops, _ = made(dataset_of(profile, group, images={"maxPixels": 10_000}))
        assert not drops


def test_a_bomb_is_refused_from_its_header_in_every_group(tmp_path: Path) -> None:
    bomb = saved(Image.new("1", (19_000, 19_000)), "PNG")
    assert len(bomb) < 100_000
    groups = [
        captioned(tmp_path, [bomb, GOOD]),
        edit(
            tmp_path,
            pa.array([[GOOD, bomb], [GOOD, GOOD]], pa.list_(pa.binary())),
            pa.array([[["a"]], [["b"]]], pa.list_(pa.list_(pa.string()))),
        ),
        vlm(tmp_path, asked("<image>", image="bomb.png"), GOOD_LINE),
    ]
    (tmp_path / "vlm/images/bomb.png").write_bytes(bomb)
    for group in groups:
        _, drops, error = made(dataset_of(STRICT, group))
        assert not error
        assert drops.keys() == {DropReason.IMAGE_TOO_LARGE}


# --- rows -----------------------------------------------------------------------------------------

NOT_TEXT, NOT_OBJECT = DropReason.CAPTION_NOT_TEXT, DropReason.CAPTION_NOT_OBJECT


@pytest.mark.parametrize(
    ("captions", "automodel", "strict"),
    [
        ('{"a": "red"}', "", ""),
        ('["red", "green"]', NOT_OBJECT, ""),
        ('"red"', NOT_OBJECT, ""),
        ("a red car", DropReason.T2I_CAPTION_PARSE, ""),
        (None, DropReason.T2I_CAPTION_PARSE, DropReason.T2I_CAPTION_PARSE),
        ("null", NOT_OBJECT, NOT_OBJECT),
        ("3", NOT_OBJECT, NOT_OBJECT),
        ('["red", 3]', NOT_OBJECT, NOT_TEXT),
        ('["red", null]', NOT_OBJECT, NOT_TEXT),
        ('{"a": null}', NOT_TEXT, NOT_TEXT),
        ('{"a": "red', DropReason.T2I_CAPTION_PARSE, DropReason.T2I_CAPTION_PARSE),
    ],
)
def test_captions_are_an_object_or_also_a_list_or_a_text(
    tmp_path: Path, captions: str | None, automodel: str, strict: str
) -> None:
    for profile, reason in ((AUTOMODEL, automodel), (STRICT, strict)):
        group = t2i(tmp_path / profile.name, [GOOD] * 2, pa.array([captions, '{"a": "good"}']))
        _, drops, error = made(dataset_of(profile, group))
        assert not error
        assert set(drops) == ({reason} if reason else set())


def test_a_column_of_lists_of_captions_is_dropped_or_read(tmp_path: Path) -> None:
    for profile in BOTH:
        group = t2i(tmp_path / profile.name, [GOOD], pa.array([["red", "green"]]))
        batches, _, error = made(dataset_of(profile, group))
        assert bool(batches) == (profile is STRICT)
        assert bool(error) == (profile is AUTOMODEL)


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_images_as_structs_of_bytes_and_path_are_dropped_or_read(tmp_path: Path) -> None:
    value = {"bytes": GOOD, "path": "a.png"}
    for profile in BOTH:
        folder = tmp_path / profile.name
        groups = [
            t2i(folder, [value, {"bytes": None, "path": "a.png"}], pa.array(['{"a": "red"}'] * 2), STRUCT),
            edit(
                folder,
                pa.array([[value, value]], pa.list_(STRUCT)),
                pa.array([[["brighter"]]], pa.list_(pa.list_(pa.string()))),
            ),
        ]
        for group in groups:
            batches, _, error = made(dataset_of(profile, group))
            assert bool(batches) == (profile is STRICT)
            assert bool(error) == (profile is AUTOMODEL)


def test_one_instruction_a_step_loses_a_letter_or_is_read_whole(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(HERE / "data/tokenizer.json"))
    for profile in BOTH:
        images = pa.array([[GOOD, GOOD]], pa.list_(pa.binary()))
        group = edit(tmp_path / profile.name, images, pa.array([["brighter"]], pa.list_(pa.string())))
        [batch, *_], _, _ = made(dataset_of(profile, group))
        text = tokenizer.decode(batch["packed_text_ids"].tolist(), skip_special_tokens=True)
        assert ("brighter" in text) == (profile is STRICT)


@pytest.mark.parametrize("none", ["", "None", None])
def test_a_line_that_names_no_image_is_dropped_or_a_text(tmp_path: Path, none: str | None) -> None:
    for profile in BOTH:
        group = vlm(tmp_path / profile.name, asked("a question", image=none), GOOD_LINE)
        _, drops, _ = made(dataset_of(profile, group))
        assert set(drops) == ({DropReason.JSONL_PARSE} if profile is AUTOMODEL else set())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (asked("<image> and <image>", image="good.png"), DropReason.IMAGE_SURPLUS),
        (asked("<image>"), DropReason.IMAGE_SURPLUS),
        (asked("<image>", image=["good.png", "good.png"]), DropReason.IMAGE_UNREFERENCED),
        (asked("no tag", image="good.png"), DropReason.IMAGE_UNREFERENCED),
        (asked("<image>", image="../outside.png"), DropReason.JSONL_PARSE),
    ],
)
def test_images_that_do_not_match_their_text_are_passed_over_or_dropped(
    tmp_path: Path, row: dict[str, Any], reason: DropReason
) -> None:
    for profile in BOTH:
        _, drops, _ = made(dataset_of(profile, vlm(tmp_path / profile.name, row, GOOD_LINE)))
        assert set(drops) == ({reason} if profile is STRICT else set())


def test_counts_of_row_groups_are_believed_or_taken_from_footers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = edit(
        tmp_path,
        pa.array([[GOOD, GOOD]] * 6, pa.list_(pa.binary())),
        pa.array([[["brighter"]]] * 6, pa.list_(pa.list_(pa.string()))),
    )
    info = {"edit/a.parquet": {"num_row_groups": 2}, "elsewhere/b.parquet": {"num_row_groups": 9}}
    (tmp_path / "info.json").write_text(json.dumps(info))
    group["datasets"][0]["parquetInfo"] = str(tmp_path / "info.json")
    for profile in BOTH:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            batches, _, _ = made(dataset_of(profile, group), packs=6)
        units = {entry["data_indexes"][0] for batch in batches for entry in batch["batch_data_indexes"]}
        assert units == (set(range(2)) if profile is AUTOMODEL else set(range(3)))
        assert "elsewhere/b.parquet" in caplog.text


# --- ends -----------------------------------------------------------------------------------------


def faults(dataset: BagelDataset, world_size: int) -> list[str]:
    """What the check of a resource finds, before a run."""
    found = []
    for _, look in source_looks(dataset, world_size, open_storage()):
        try:
            look()
        except DataError as error:
            found.append(str(error))
    return found


def test_too_few_units_are_refused_before_a_run_with_the_arithmetic(tmp_path: Path) -> None:
    for profile in BOTH:
        [fault] = faults(dataset_of(profile, captioned(tmp_path, [GOOD])), 4)
        assert "fewer units than ranks" in fault
        assert "1 units for world size 4" in fault


def test_shapes_that_are_read_pass_the_check_before_a_run(tmp_path: Path) -> None:
    value = {"bytes": GOOD, "path": "a.png"}
    group = t2i(tmp_path, [value], pa.array([["red"]]), STRUCT)
    for profile in BOTH:
        assert bool(faults(dataset_of(profile, group), 1)) == (profile is AUTOMODEL)


@pytest.mark.parametrize("data", [b"no image", broken_webp(40, 30)])
def test_a_group_whose_every_row_is_bad_fails_after_the_bound(tmp_path: Path, data: bytes) -> None:
    for profile in BOTH:
        group = captioned(tmp_path / profile.name, [data] * 5)
        batches, _, error = made(dataset_of(profile, group), packs=100)
        assert len(batches) < 12
        assert "group t2i gives no sample that can be packed" in error
        assert "12 " in error
        assert "a.parquet#" in error, "names a row"
        assert "image_undecodable" in error or "t2i_image_parse" in error


def test_another_topology_is_refused_naming_both(tmp_path: Path) -> None:
    for profile in BOTH:
        dataset = dataset_of(profile, captioned(tmp_path, [GOOD]))
        with contextlib.closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=0)) as stream:
            next_batch(stream)
            state = stream.state()
        state["topology"]["world_size"] = 2
        with pytest.raises(BagelplaneError, match=r"'world_size': 2.*'world_size': 1"):
            open_rank_stream(dataset, Topology(0, 1, 0), state=state, decode_threads=0)
