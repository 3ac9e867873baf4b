"""The resource: what is accepted, and that each fault is named with its path, its line and what to do."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from bagelplane.errors import SpecError
from bagelplane.spec import (
    BagelDataset,
    Budgets,
    DatasetSpec,
    InvalidDatasetError,
    config_hash,
    load_dataset,
    refuse_unsupported,
    spec_hash,
)
from bagelplane.spec_advice import give_advice
from bagelplane.spec_fields import iter_fields
from bagelplane.spec_values import check_uri, parse_quantity

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "docs" / "examples").glob("*.yaml"))

VALID = """
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {name: bagel-sft}
spec:
  profile: Automodel
  storage: {endpointURL: http://127.0.0.1:9000, region: us-east-1, credentialsDir: keys}
  tokenizer: {uri: s3://bucket/tokenizer.json}
  groups:
  - name: t2i
    type: t2i_pretrain
    weight: 1
    mandatory: true
    datasets: [{name: t2i, uri: s3://bucket/t2i/, numUsedData: 8}]
    imageTransform: {stride: 16, maxSize: 512, minSize: 256}
  - name: edit
    type: unified_edit
    datasets: [{name: edit, uri: s3://bucket/edit/, parquetInfo: info.json}]
    imageTransform: {stride: 16, maxSize: 512, minSize: 256}
    vitImageTransform: {stride: 14, maxSize: 518, minSize: 224}
  - name: vlm
    type: vlm_sft
    weight: 2.5
    datasets: [{name: vlm, uri: s3://bucket/vlm/, jsonl: train.jsonl, images: images/}]
    imageTransform: {stride: 14, maxSize: 980, minSize: 378, maxPixels: 2007040}
  budgets: {expectedTokens: 1024, maxTokens: 1280, maxTokensPerSample: 700, attention: Flex}
  sharding: {mode: Bagel, workersPerRank: 0}
  snapshots: {uri: s3://bucket/snapshots/}
  dataplane: {ring: {size: 2Gi}, resources: {limits: {cpu: 2, memory: 8Gi}}}
"""


def valid() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(VALID)
    return data


def put(data: Any, path: str, value: object) -> None:
    """Set `spec.groups.0.weight` and the like; a value of `...` removes it."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        data = data[part] if isinstance(part, int) else data.setdefault(part, {})
    if value is ...:
        del data[last]
    else:
        data[last] = value


def changed(path: str, value: object) -> dict[str, Any]:
    data = valid()
    put(data, path, value)
    return data


def problems_in(data: object) -> list[str]:
    with pytest.raises(InvalidDatasetError) as caught:
        BagelDataset.from_mapping(data)  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


def message_of(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        BagelDataset.from_yaml(text, "file.yaml")
    return str(caught.value)


# --- what is accepted -----------------------------------------------------------------------------


def test_fields_are_read_under_their_yaml_names() -> None:
    spec = BagelDataset.from_yaml(VALID).spec
    assert spec.storage.endpoint_url == "http://127.0.0.1:9000"
    assert spec.groups[1].datasets[0].parquet_info_uri == "s3://bucket/edit/info.json"
    assert spec.groups[2].datasets[0].images_uri == "s3://bucket/vlm/images/"
    assert spec.groups[2].datasets[0].jsonl_uri == "s3://bucket/vlm/train.jsonl"
    assert spec.dataplane.ring.size == 2 * 2**30
    assert spec.dataplane.resources.limits == {"cpu": "2", "memory": "8Gi"}
    assert spec.budgets.use_flex


def test_defaults_are_the_peers() -> None:
    spec = BagelDataset.from_yaml(VALID).spec
    peer = {"expected_tokens": 32768, "max_tokens": 36864, "max_tokens_per_sample": 16384}
    peer |= {"prefer_buffer_before": 16384, "max_buffer_size": 50, "use_flex": False}
    assert {name: getattr(Budgets(), name) for name in peer} == peer
    assert spec.conditioning.model_dump(by_alias=False) == {
        "text_dropout": 0.1,
        "vit_dropout": 0.4,
        "vae_dropout": 0.1,
    }
    assert (spec.model.vae_image_downsample, spec.model.max_latent_size) == (16, 32)
    assert (spec.model.vit_patch_size, spec.model.max_patches_per_side) == (14, 70)
    transform = spec.groups[0].image_transform
    assert transform is not None
    assert transform.max_pixels == 14 * 14 * 9 * 1024


def test_a_resource_survives_its_plain_form() -> None:
    dataset = BagelDataset.from_yaml(VALID)
    plain = json.loads(json.dumps(dataset.to_mapping()))
    assert BagelDataset.from_mapping(plain) == dataset
    assert spec_hash(BagelDataset.from_mapping(plain)) == spec_hash(dataset)


def test_what_the_api_server_adds_is_accepted() -> None:
    data = changed("status", {"conditions": []})
    data["metadata"] |= {
        "uid": "1",
        "resourceVersion": "5",
        "generation": 2,
        "managedFields": [],
        "labels": {},
    }
    assert BagelDataset.from_mapping(data).metadata.name == "bagel-sft"


def test_a_field_with_nothing_behind_it_is_left_out() -> None:
    data = valid()
    for path in ("storage", "snapshots.uri", "budgets", "groups.0.weight", "groups.0.datasets.0.images"):
        put(data, f"spec.{path}", None)
    without = valid()
    for path in ("storage", "snapshots.uri", "budgets", "groups.0.weight"):
        put(without, f"spec.{path}", ...)
    assert BagelDataset.from_mapping(data) == BagelDataset.from_mapping(without)


def test_a_resource_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        BagelDataset.from_yaml(VALID).spec.budgets.max_tokens = 1  # type: ignore[misc]


def test_yaml_anchors_and_merge_keys_work() -> None:
    text = VALID.replace(
        "imageTransform: {stride: 16, maxSize: 512, minSize: 256}",
        "imageTransform: &vae {stride: 16, maxSize: 512, minSize: 256}",
        1,
    )
    text = text.replace(
        "imageTransform: {stride: 16, maxSize: 512, minSize: 256}", "imageTransform: {<<: *vae, maxSize: 768}"
    )
    transform = BagelDataset.from_yaml(text).spec.groups[1].image_transform
    assert transform is not None
    assert (transform.stride, transform.max_size) == (16, 768)


def test_numbers_without_a_point_are_numbers() -> None:
    text = VALID.replace("weight: 2.5", "weight: 1e-3")
    assert BagelDataset.from_yaml(text).spec.groups[2].weight == 0.001


def test_the_flex_block_can_be_turned_off() -> None:
    data = changed(
        "spec.budgets",
        {"expectedTokens": 400, "maxTokens": 420, "maxTokensPerSample": 228, "attention": "Flex"},
    )
    (problem,) = problems_in(data)
    assert problem.startswith("spec.budgets.maxTokens: must be a multiple of 128")
    assert "384 or 512" in problem
    put(data, "spec.budgets.flexBlockSize", 1)
    assert BagelDataset.from_mapping(data).spec.budgets.max_tokens == 420
    put(data, "spec.budgets", {"expectedTokens": 400, "maxTokens": 420, "maxTokensPerSample": 228})
    assert not BagelDataset.from_mapping(data).spec.budgets.use_flex


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid_and_need_no_advice(path: Path) -> None:
    dataset = load_dataset(path)
    refuse_unsupported(dataset)
    assert [str(advice) for advice in give_advice(dataset)] == []


# --- what is refused, and how -----------------------------------------------------------------------

FAULTS = [
    ("apiVersion", "v1", "apiVersion: must be 'bagelplane.io/v1alpha1' (got 'v1')"),
    ("kind", "Dataset", "kind: must be 'BagelDataset' (got 'Dataset'). Fix: did you mean `BagelDataset`?"),
    ("metadata.name", "Bagel_SFT", "metadata.name: must be lower-case letters"),
    ("spec", ..., "spec: is missing"),
    ("spec.profile", "strict", "did you mean `Strict`?"),
    ("spec.groups", [], "spec.groups: must have at least one entry"),
    (
        "spec.groups.1.weight",
        -1,
        "spec.groups[1].weight: must be at least 0 (got -1). Fix: write for example",
    ),
    ("spec.groups.1.weight", "1", "spec.groups[1].weight: must be a number (got '1')"),
    ("spec.groups.1.weight", float("nan"), "spec.groups[1].weight: must be a"),
    ("spec.groups.0.wieght", 1, "spec.groups[0].wieght: is no known field. Fix: did you mean `weight`?"),
    (
        "spec.budgets.max_tokens",
        1,
        "spec.budgets.max_tokens: is no known field. Fix: did you mean `maxTokens`?",
    ),
    ("spec.groups.0.name", "edit", "spec.groups[1].name: must be unique, groups[0] has it too (got 'edit')"),
    ("spec.groups.0.type", "T2I", "spec.groups[0].type: must be lower-case letters"),
    ("spec.groups.0.mandatory", "yes", "spec.groups[0].mandatory: must be true or false (got 'yes')"),
    ("spec.groups.0.datasets", {}, "spec.groups[0].datasets: must be a list"),
    ("spec.groups.0.datasets.0.numUsedData", 0, "numUsedData: must be at least 1 (got 0)"),
    ("spec.groups.0.datasets.0.uri", ..., "datasets[0].uri: is missing. Fix: add for example `uri: s3://"),
    ("spec.groups.0.datasets.0.uri", "s3:/bucket/x", "datasets[0].uri: has its slashes missing"),
    ("spec.groups.0.datasets.0.uri", "s3:///x", "datasets[0].uri: must name a bucket"),
    ("spec.groups.0.datasets.0.uri", "http://x/y", "must begin with one of the schemes s3, gs, az, file"),
    ("spec.groups.0.datasets.0.uri", "file://x/y", "must name an absolute path"),
    ("spec.groups.0.datasets.0.uri", "s3://bucket/../x", "must not go up with `..`"),
    ("spec.groups.0.datasets.0.uri", " data", "must be an address without surrounding blanks"),
    ("spec.groups.0.datasets.0.jsonl", "x.jsonl", "jsonl: is not read by type t2i_pretrain"),
    ("spec.groups.0.imageTransform", ..., "spec.groups[0].imageTransform: is missing, a group of type t2i"),
    ("spec.groups.1.vitImageTransform", ..., "spec.groups[1].vitImageTransform: is missing"),
    ("spec.groups.2.datasets.0.images", ..., "spec.groups[2].datasets[0].images: is missing"),
    ("spec.groups.2.datasets.0.jsonl", ..., "spec.groups[2].datasets[0].jsonl: is missing"),
    ("spec.groups.2.imageTransform.stride", 16, "stride: must be a multiple of model.vitPatchSize, 14"),
    ("spec.groups.0.imageTransform.minSize", 600, "minSize: must be at most maxSize, 512 (got 600)"),
    (
        "spec.groups.2.frameSampler",
        {"minFrames": 13},
        "frameSampler.minFrames: must be at most maxFrames, 12",
    ),
    ("spec.budgets.expectedTokens", 1281, "spec.budgets.expectedTokens: must be at most maxTokens, 1280"),
    ("spec.budgets.maxTokensPerSample", 1281, "maxTokensPerSample: must be at most maxTokens, 1280"),
    ("spec.budgets.maxTokens", 40000, "spec.budgets.maxTokens: must be a multiple of 128"),
    ("spec.conditioning", {"vitDropout": 1.5}, "spec.conditioning.vitDropout: must be at most 1 (got 1.5)"),
    ("spec.sharding.workersPerRank", -1, "spec.sharding.workersPerRank: must be at least 0"),
    ("spec.sharding.dataSeed", -1, "spec.sharding.dataSeed: must be at least 0"),
    ("spec.sharding.dataSeed", 2**64, "spec.sharding.dataSeed: must be at most 9223372036854775807"),
    ("spec.sharding.dataSeed", 1.5, "spec.sharding.dataSeed: must be a whole number (got 1.5)"),
    ("spec.dataplane.ring.size", "2GB", "spec.dataplane.ring.size: must be a quantity of bytes (got '2GB')"),
    ("spec.storage.endpointURL", "s3.example.com", "spec.storage.endpointURL: must be http:// or https://"),
    ("spec.storage.credentialsDir", "s3://b/keys", "spec.storage.credentialsDir: must be a local path"),
    ("spec.tokenizer.specialTokens", {"bos": True}, "specialTokens.bos: must be the token's text or its id"),
    ("spec.snapshots", 5, "spec.snapshots: must be a mapping"),
    ("spec.tokenizer.uri", None, "spec.tokenizer.uri: is missing"),
    (
        "spec.dataplane.resources.limits.cpu",
        0.5,
        "cpu: must be a Kubernetes quantity (got 0.5). Fix: quote it",
    ),
    ("spec.groups.0.datasets.0.uri", "s3://bucket/" + "x" * 2048, "must have at most 2048 characters"),
    ("spec.groups.0.datasets", [{"name": f"d{i}", "uri": "x"} for i in range(257)], "at most 256 entries"),
    ("spec.snapshots", {"lineage": True}, "spec.snapshots.lineage: needs a place for the log: snapshots.uri"),
]


@pytest.mark.parametrize(("path", "value", "expected"), FAULTS, ids=[fault[2][:40] for fault in FAULTS])
def test_a_fault_is_one_line_with_path_and_fix(path: str, value: object, expected: str) -> None:
    problems = problems_in(changed(path, value))
    assert any(expected in problem for problem in problems), problems
    assert len(problems) == 1 or path == "spec.budgets.maxTokens"
    assert "\n" not in problems[0]
    assert ". Fix: " in problems[0]


def test_weights_need_a_positive_sum() -> None:
    data = valid()
    for group in data["spec"]["groups"]:
        group["weight"] = 0
    assert problems_in(data)[0].startswith("spec.groups: must have weights with a sum above 0")


def test_data_sets_of_a_group_need_different_names() -> None:
    data = valid()
    data["spec"]["groups"][0]["datasets"] *= 2
    assert problems_in(data)[0].startswith("spec.groups[0].datasets[1].name: must be unique")


def test_registered_types_bring_their_own_rules() -> None:
    data = changed(
        "spec.groups.0", {"name": "own", "type": "my_type", "datasets": [{"name": "a", "uri": "x"}]}
    )
    assert BagelDataset.from_mapping(data).spec.groups[0].type == "my_type"


def test_every_fault_is_listed_with_its_line() -> None:
    text = (
        VALID.replace("weight: 1\n", "weight: -1\n").replace("Automodel", "Automobile").replace("2Gi", "2GG")
    )
    lines = message_of(text).splitlines()
    assert lines[0] == "file.yaml: 3 problems"
    assert [line.strip().split(":")[0] for line in lines[1:]] == [
        "spec.profile",
        "spec.groups[0].weight",
        "spec.dataplane.ring.size",
    ]
    number = next(index for index, line in enumerate(text.splitlines(), 1) if "weight: -1" in line)
    assert f"(got -1, line {number})" in lines[2]


def test_credentials_in_an_endpoint_are_not_repeated() -> None:
    text = VALID.replace("http://127.0.0.1:9000", "http://user:hidden@127.0.0.1:9000")
    assert "hidden" not in message_of(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no document"),
        ("# only a comment\n", "holds no document"),
        (VALID + "---\n" + VALID, "holds 2 documents, one is expected (line 32)"),
        ("spec: [1, 2\nkind: x", "is no YAML: line 2, column"),
        ("a: b\n\tc: d", "is no YAML: line 2, column 1"),
        (VALID.replace("kind:", "kind: X\nkind:", 1), "kind: appears twice, first in line 3 (line 4)"),
        (VALID.replace("weight: 2.5", "weight: 1\n    weight: 2"), "spec.groups[2].weight: appears twice"),
        ("a: &a [*a]", "refers to itself"),
        ("a: !!python/object:os.system {}", "has an unknown YAML tag"),
        ("1: x", "has a key that is no text"),
        ("? [a]\n: x", "has a key that is no text"),
        ("just text", "must be a mapping"),
        ("- a", "must be a mapping"),
        ("[" * 2000, "is "),
        ("a: !!int x", "has a value that does not read"),
        ("a: \x00", "is no YAML"),
    ],
)
def test_yaml_that_is_no_resource_is_told_apart(text: str, expected: str) -> None:
    assert expected in message_of(text)


def test_a_few_lines_cannot_fill_the_memory() -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "holds more than 50000 values" in message_of("\n".join(layers))


def test_a_file_that_cannot_be_read_is_a_spec_error(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(VALID.replace("bagel-sft", "b\xe4gel").encode("latin-1"))
    for name, expected in {
        "missing.yaml": "No such file",
        ".": "is a folder",
        "latin.yaml": "is no UTF-8",
    }.items():
        with pytest.raises(SpecError, match=expected):
            load_dataset(tmp_path / name)


def test_a_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_dataset(tmp_path / "a.yaml").metadata.name == "bagel-sft"


def test_the_error_crosses_process_borders_whole() -> None:
    with pytest.raises(InvalidDatasetError) as caught:
        BagelDataset.from_mapping({})
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert copied.problems == caught.value.problems


def test_what_does_not_work_yet_is_refused_line_by_line() -> None:
    data = changed("spec.storage.cache", {"sizeLimit": "10Gi"})
    dataset = BagelDataset.from_mapping(data)
    with pytest.raises(InvalidDatasetError) as caught:
        refuse_unsupported(dataset)
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["spec.storage.cache"]
    refuse_unsupported(BagelDataset.from_yaml(VALID))
    refuse_unsupported(BagelDataset.from_mapping(changed("spec.profile", "Strict")))
    refuse_unsupported(BagelDataset.from_mapping(changed("spec.dataplane.pixelFormat", "float32")))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.sharding", {"mode": "Elastic", "streams": 6}, "streams: is not divisible by 4"),
        ("spec.sharding", {"mode": "Elastic", "workersPerRank": 2}, "workersPerRank: is not used by"),
        ("spec.groups.1.weight", 0, "spec.groups[1].weight: is 0"),
        ("spec.snapshots", {}, "spec.snapshots.uri: is not set"),
        (
            "spec.model",
            {"maxLatentSize": 16},
            "allows 32 patches a side, model.maxLatentSize has positions for 16",
        ),
        ("spec.groups.1.mandatory", True, "lets the 2 mandatory samples of a pack take up to 1400 tokens"),
    ],
)
def test_advice_names_what_is_seldom_meant(path: str, value: object, expected: str) -> None:
    advice = [str(line) for line in give_advice(BagelDataset.from_mapping(changed(path, value)))]
    assert any(expected in line for line in advice), advice
    assert list(give_advice(BagelDataset.from_yaml(VALID))) == []


# --- hash -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "other"),
        ("spec.storage", {"endpointURL": "http://127.0.0.1:1", "region": "eu"}),
        ("spec.snapshots", {"uri": "elsewhere", "everySteps": 3, "lineage": True}),
        ("spec.dataplane", {"decodeThreads": 8, "ring": {"packs": 2}}),
        ("spec.budgets.flexBlockSize", 64),
        ("spec.drops", {"maxConsecutive": 7}),
        ("spec.groups.1.weight", 1),
        ("spec.conditioning", {"textDropout": 0.1}),
    ],
)
def test_hash_ignores_what_does_not_move_the_stream(path: str, value: object) -> None:
    assert spec_hash(BagelDataset.from_mapping(changed(path, value))) == spec_hash(
        BagelDataset.from_yaml(VALID)
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.profile", "Strict"),
        ("spec.tokenizer.uri", "other.json"),
        ("spec.groups.1.weight", 2),
        ("spec.groups.0.datasets.0.numUsedData", 9),
        ("spec.groups.0.imageTransform.minSize", 128),
        ("spec.budgets.maxBufferSize", 3),
        ("spec.budgets.attention", "DenseMasks"),
        ("spec.conditioning", {"textDropout": 0.2}),
        ("spec.model", {"maxLatentSize": 64}),
        ("spec.sharding.dataSeed", 43),
        ("spec.sharding.workersPerRank", 1),
        ("spec.images", {"maxPixels": 5}),
    ],
)
def test_hash_follows_what_moves_the_stream(path: str, value: object) -> None:
    assert spec_hash(BagelDataset.from_mapping(changed(path, value))) != spec_hash(
        BagelDataset.from_yaml(VALID)
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.storage", {"endpointURL": "http://127.0.0.1:1", "region": "eu"}),
        ("spec.snapshots", {"uri": "elsewhere", "everySteps": 3}),
        ("spec.dataplane", {"decodeThreads": 8, "ring": {"packs": 2}}),
        ("spec.drops", {"maxConsecutive": 7}),
        ("spec.groups.1.weight", 2),
    ],
)
def test_config_hash_follows_every_field_of_the_spec(path: str, value: object) -> None:
    assert config_hash(BagelDataset.from_mapping(changed(path, value))) != config_hash(
        BagelDataset.from_yaml(VALID)
    )


def test_config_hash_takes_a_default_that_is_written_out_for_what_it_is() -> None:
    dataset = BagelDataset.from_yaml(VALID)
    assert len(config_hash(dataset)) == 64
    assert config_hash(BagelDataset.from_mapping(dataset.to_mapping())) == config_hash(dataset)
    renamed = BagelDataset.from_mapping(changed("metadata.labels", {"team": "x"}))
    assert config_hash(renamed) == config_hash(dataset), "metadata is no configuration"


def test_hash_and_defaults_stay_as_released() -> None:
    """Snapshots name the hash and leave defaults out of it: neither may change within v1alpha1."""
    assert spec_hash(BagelDataset.from_yaml(VALID)) == RELEASED_HASH
    documented = {field.path: field.default for field in iter_fields(DatasetSpec) if field.default}
    determining = ("profile", "tokenizer", "groups", "budgets", "conditioning", "model", "sharding", "images")
    defaults = {
        path: default
        for path, default in documented.items()
        if path.startswith(determining) and default != "required"
    }
    assert defaults == RELEASED_DEFAULTS


RELEASED_HASH = "df28ab2824d3b1011e6099264b7ac521dc307d65697bcd43065ce61e8d5d84de"
RELEASED_DEFAULTS = {
    "profile": "Strict",
    "tokenizer.specialTokens.bos": "<|im_start|>",
    "tokenizer.specialTokens.eos": "<|im_end|>",
    "tokenizer.specialTokens.startOfImage": "<|vision_start|>",
    "tokenizer.specialTokens.endOfImage": "<|vision_end|>",
    "groups[].weight": "1.0",
    "groups[].mandatory": "false",
    "groups[].datasets[].images": "none",
    "groups[].datasets[].jsonl": "none",
    "groups[].datasets[].parquetInfo": "none",
    "groups[].datasets[].numUsedData": "none",
    "groups[].imageTransform": "none",
    "groups[].imageTransform.maxPixels": "1806336",
    "groups[].vitImageTransform": "none",
    "groups[].vitImageTransform.maxPixels": "1806336",
    "groups[].frameSampler.maxFrames": "12",
    "groups[].frameSampler.minFrames": "8",
    "groups[].shuffleLines": "false",
    "groups[].shuffleSeed": "0",
    "budgets.expectedTokens": "32768",
    "budgets.maxTokens": "36864",
    "budgets.maxTokensPerSample": "16384",
    "budgets.preferBufferBefore": "16384",
    "budgets.maxBufferSize": "50",
    "budgets.attention": "DenseMasks",
    "budgets.flexBlockSize": "128",
    "conditioning.textDropout": "0.1",
    "conditioning.vitDropout": "0.4",
    "conditioning.vaeDropout": "0.1",
    "model.vaeImageDownsample": "16",
    "model.maxLatentSize": "32",
    "model.vitPatchSize": "14",
    "model.maxPatchesPerSide": "70",
    "model.interpolatePositions": "false",
    "sharding.mode": "Elastic",
    "sharding.streams": "64",
    "sharding.workersPerRank": "1",
    "sharding.dataSeed": "42",
    "sharding.globalSeed": "4396",
    "images.maxPixels": "89000000",
}

# --- kinds of value ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("10Gi", 10 * 2**30), ("1.5G", 1_500_000_000), ("512Mi", 2**29), ("7", 7), (7, 7), ("2k", 2000)],
)
def test_quantities_are_bytes(text: object, size_bytes: int) -> None:
    assert parse_quantity(text) == size_bytes


@pytest.mark.parametrize("text", ["", "Gi", "-1", "0", "10 Gi", "10GB", "1e3", True, None, 1.5, "9" * 19])
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_quantity(text)


@pytest.mark.parametrize(
    "uri",
    ["s3://bucket", "s3://bucket/a b/", "gs://b1/x", "az://box/x", "file:///data", "/data", "data/x", "../x"],
)
def test_addresses_that_storage_opens_are_accepted(uri: str) -> None:
    assert check_uri(uri) == uri


def test_every_field_says_what_it_means() -> None:
    fields = list(iter_fields())
    assert len(fields) > 80
    for field in fields:
        assert field.description.endswith("."), field.path
        numeric = field.kind in ("integer", "number", "quantity")
        assert field.unit or not numeric, f"{field.path} has no unit"


# --- whatever comes ---------------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["10Gi", "s3://bucket/x", "Strict", "vlm_sft", "../x", "-1", "0", "."]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


def places(data: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if isinstance(data, dict):
        entries = list(data.items())
    elif isinstance(data, list):
        entries = list(enumerate(data))
    else:
        entries = []
    return [path, *(place for key, value in entries for place in places(value, (*path, key)))][
        0 if path else 1 :
    ]


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_mutated_resource_is_valid_or_a_spec_error(data: st.DataObject) -> None:
    document = valid()
    for _ in range(data.draw(st.integers(1, 4), "mutations")):
        everywhere = places(document)
        if not everywhere:
            break
        *parents, last = data.draw(st.sampled_from(everywhere), "place")
        inside: Any = document
        for part in parents:
            inside = inside[part]
        action = data.draw(st.sampled_from(["replace", "remove", "add", "swap"]), "action")
        if action == "replace":
            inside[last] = data.draw(JSON_VALUES, "value")
        elif action == "remove":
            del inside[last]
        elif action == "swap":
            inside[last] = copy.deepcopy(data.draw(st.sampled_from([document, document.get("spec"), inside])))
        elif isinstance(inside, dict):
            inside[data.draw(st.text(max_size=10), "key")] = data.draw(JSON_VALUES, "value")
    text = yaml.safe_dump(document)
    for make in (lambda: BagelDataset.from_mapping(document), lambda: BagelDataset.from_yaml(text)):
        try:
            dataset = make()
        except SpecError as error:
            assert str(error)  # noqa: PT017  (either outcome is right; the message must come out)
        else:
            assert len(spec_hash(dataset)) == 64
            assert all(str(advice) for advice in give_advice(dataset))
            assert BagelDataset.from_mapping(dataset.to_mapping()) == dataset


@settings(deadline=None, max_examples=200)
@given(st.integers(0, len(VALID)), st.integers(0, 30), st.text(max_size=12))
def test_a_damaged_text_is_valid_or_a_spec_error(start: int, length: int, insert: str) -> None:
    text = VALID[:start] + insert + VALID[start + length :]
    try:
        BagelDataset.from_yaml(text)
    except SpecError as error:
        assert str(error)  # noqa: PT017  (either outcome is right; the message must come out)


def test_a_resource_of_nothing_but_faults_is_answered_in_time() -> None:
    with pytest.raises(SpecError, match=r"201 problems(.|\n)*has 99802 problems more, correct these first$"):
        BagelDataset.from_mapping({"apiVersion": "x", **{f"field{n}": n for n in range(99_998)}})
