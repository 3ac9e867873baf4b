"""The CRD: what the models accept the API server accepts, and each bound is the same on both sides."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, reject
from hypothesis import strategies as st
from pydantic import ValidationError

from bagelplane.spec import BagelDataset, config_hash, spec_hash
from bagelplane.spec_schema import build_crd, build_object
from bagelplane.spec_status import DatasetStatus
from bagelplane_operator import naming

Path = tuple[str | int, ...]

VERSION = build_crd()["spec"]["versions"][0]
ROOT = VERSION["schema"]["openAPIV3Schema"]
SPEC = ROOT["properties"]["spec"]

# Every field, so that every bound can be put to the test in place.
FULL = """
apiVersion: bagelplane.io/v1alpha1
kind: BagelDataset
metadata: {name: bagel-sft}
spec:
  profile: Automodel
  storage:
    endpointURL: http://127.0.0.1:9000
    region: us-east-1
    secretRef: {name: keys}
    credentialsDir: keys
    cache: {sizeLimit: 10Gi}
    readAhead: {size: 512Mi, requests: 128}
  tokenizer:
    uri: s3://bucket/tokenizer.json
    specialTokens: {bos: a, eos: 2, startOfImage: b, endOfImage: c}
  groups:
  - name: vlm
    type: vlm_sft
    weight: 1
    mandatory: true
    datasets:
    - {name: vlm, uri: s3://bucket/vlm/, jsonl: a.jsonl, images: images/, parquetInfo: info.json, numUsedData: 8}
    imageTransform: {stride: 14, maxSize: 980, minSize: 378, maxPixels: 2007040}
    vitImageTransform: {stride: 14, maxSize: 518, minSize: 224, maxPixels: 2007040}
    frameSampler: {maxFrames: 12, minFrames: 8}
    shuffleLines: true
    shuffleSeed: 0
  budgets:
    expectedTokens: 1024
    maxTokens: 1280
    maxTokensPerSample: 700
    preferBufferBefore: 700
    maxBufferSize: 5
    attention: Flex
    flexBlockSize: 128
  conditioning: {textDropout: 0.1, vitDropout: 0.4, vaeDropout: 0.1}
  model:
    vaeImageDownsample: 16
    maxLatentSize: 32
    vitPatchSize: 14
    maxPatchesPerSide: 70
    interpolatePositions: false
  sharding: {mode: Bagel, streams: 64, workersPerRank: 0, dataSeed: 42, globalSeed: 0}
  snapshots: {uri: s3://bucket/snapshots/, everySteps: 100, keepLast: 5, keepEvery: 10000, lineage: true}
  resume: {allowSpecChange: [groups]}
  drops: {maxConsecutive: 1000}
  images: {maxPixels: 89000000}
  dataplane:
    image: bagelplane/dataplane:0.1.0
    resources: {requests: {cpu: 500m}, limits: {memory: 8Gi}}
    decodeThreads: 4
    ring: {packs: 4, size: 2Gi}
    pixelFormat: uint8
"""


def full() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(FULL)
    del data["spec"]["groups"][0]["datasets"][0]["parquetInfo"]  # another type of group reads it
    return data


# --- as the API server applies a structural schema ------------------------------------------------


def refusals(schema: Mapping[str, Any], value: object, path: str = "") -> Iterator[str]:
    """What is wrong with `value`; empty where the API server would store it."""
    if value is None and ("default" in schema or schema.get("nullable")):
        return
    kind = schema.get("type")
    if not _is_of_kind(kind, value):
        yield f"{path}: is no {kind or 'integer or string'}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{path}: is none of {schema['enum']}"
    yield from _limit_refusals(schema, value, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from refusals(schema["items"], item, f"{path}[{index}]")
        for key in schema.get("x-kubernetes-list-map-keys", []):
            names = [item.get(key) for item in value if isinstance(item, dict)]
            if len(set(map(str, names))) < len(names):
                yield f"{path}: has a {key} twice"
    if isinstance(value, dict):
        yield from _object_refusals(schema, value, path)


def _object_refusals(schema: Mapping[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", []):
        if value.get(name) is None:
            yield f"{path}.{name}: is missing"
    for name, item in value.items():
        below = properties.get(name, others)
        if below is None:
            yield f"{path}.{name}: is unknown"
        elif item is not None or name not in schema.get("required", []):
            yield from refusals(below, item, f"{path}.{name}")


def _is_of_kind(kind: str | None, value: object) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    kinds = {"integer": int, "number": (int, float), "string": str, "array": list, "object": dict}
    if kind == "integer" and isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, kinds.get(kind or "", (int, str)) if kind != "boolean" else ())


def _limit_refusals(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", min(value, 2**63 - 1)):
            yield f"{path}: is out of bounds"
        return
    noun = {str: "Length", list: "Items", dict: "Properties"}.get(type(value))
    if noun is None:
        return
    if not schema.get(f"min{noun}", 0) <= len(value) <= schema.get(f"max{noun}", len(value)):
        yield f"{path}: has a length out of bounds"
    if isinstance(value, str) and not re.search(schema.get("pattern", "").replace("$", r"\Z"), value):
        yield f"{path}: does not match"


def model_findings(data: object) -> list[str]:
    """Kinds of what the models find; `value_error` is a rule of ours that a schema cannot say."""
    try:
        BagelDataset.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        # pydantic counts the good entries of a list alone: one bad one makes it "too short" as well.
        return [
            details["type"]
            for details in error.errors(include_url=False)
            if details["type"] != "too_short" or not details["input"]
        ]
    return []


# --- every place in the resource ------------------------------------------------------------------


def places(schema: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Path and schema of each field below, first entries of lists included."""
    for name, below in schema.get("properties", {}).items():
        yield (*path, name), below
        yield from places(below, (*path, name))
    if "items" in schema:
        yield from places(schema["items"], (*path, 0))
    if "additionalProperties" in schema:
        yield (*path, "cpu"), schema["additionalProperties"]


PLACES = [
    *places(SPEC, ("spec",)),
    (("metadata", "name"), ROOT["properties"]["metadata"]["properties"]["name"]),
]


def changed(path: Path, value: object) -> dict[str, Any]:
    data = full()
    parent: Any = data
    for part in path[:-1]:
        if isinstance(parent, dict) and not isinstance(parent.get(part), (dict, list)):
            parent[part] = {}
        parent = parent[part]
    parent[path[-1]] = value
    return data


def edges(schema: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """(limit, the last value within, the first one outside) of each limit of a field."""
    if "minimum" in schema:
        step = 1 if schema.get("type") != "number" else 0.001
        yield "minimum", schema["minimum"], schema["minimum"] - step
    if "maximum" in schema:
        step = 1 if schema["type"] != "number" else 0.001
        yield "maximum", schema["maximum"], schema["maximum"] + step
    elif schema.get("format") == "int64":
        yield "maximum", 2**63 - 1, 2**63
    if "maxLength" in schema:
        most = schema["maxLength"]
        digits = "x-kubernetes-int-or-string" in schema
        scheme = "http://" if schema.get("pattern", "").startswith("^(?:http") else ""
        letter = "1" if digits else "a"
        pad = scheme + letter * (most - len(scheme))
        yield "maxLength", pad if not digits or most > 100 else None, pad + letter
        yield "minLength", None, ""
    if "maxItems" in schema and "enum" in schema["items"]:
        words = schema["items"]["enum"][:1] * (schema["maxItems"] + 1)
        yield "maxItems", words[:-1], words
    elif "maxItems" in schema:
        entries = [{"name": f"n{i}", "type": "other", "uri": "x"} for i in range(schema["maxItems"] + 1)]
        for entry in entries:
            del entry["uri" if "datasets" in schema["items"]["properties"] else "type"]
            if "datasets" in schema["items"]["properties"]:
                entry["datasets"] = [{"name": "x", "uri": "x"}]  # type: ignore[assignment]
        yield "maxItems", entries[:-1], entries
        yield "minItems", None, []
    if "maxProperties" in schema:
        values = {f"r{i}": "1" for i in range(schema["maxProperties"] + 1)}
        yield "maxProperties", dict(itertools.islice(values.items(), schema["maxProperties"])), values
    if "enum" in schema:
        yield "enum", schema["enum"][0], schema["enum"][0].swapcase()


EDGES = [(path, *edge) for path, schema in PLACES for edge in edges(schema)]


def test_the_full_resource_is_valid_and_names_every_field() -> None:
    data = full()
    assert model_findings(data) == []
    assert list(refusals(ROOT, data)) == []
    for path, _ in PLACES:
        if path[-1] in ("parquetInfo", "cpu"):
            continue
        value: Any = data
        for part in path:
            value = value[part]


@pytest.mark.parametrize(
    ("path", "limit", "within", "outside"), EDGES, ids=[f"{'.'.join(map(str, e[0]))}-{e[1]}" for e in EDGES]
)
def test_a_bound_is_the_same_for_models_and_api_server(
    path: Path, limit: str, within: object, outside: object
) -> None:
    beyond = changed(path, outside)
    assert model_findings(beyond), "the models accept what is out of bounds"
    assert list(refusals(ROOT, beyond)), "the schema accepts what is out of bounds"
    if within is not None:
        data = changed(path, within)
        assert not [finding for finding in model_findings(data) if finding != "value_error"]
        assert list(refusals(ROOT, data)) == []


PATTERNS = ["", " a", "a ", "a", "A", "0", "a-b", "-a", "a_b", "a.b", "ä", "a\nb", "a\n", "a\x00", "x" * 64]
PATTERNS += [
    "s3://bucket/key",
    "s3:/x",
    "http://h:1/",
    "http://u@h",
    "http://h/p",
    "1.5G",
    "0Gi",
    "10Gi",
    "500m",
]
VALUES = [
    *PATTERNS,
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    2**31,
    2**63 - 1,
    2**63,
    0.5,
    1.5,
    [],
    {},
    ["a"],
    {"a": 1},
]


@given(
    st.lists(st.tuples(st.sampled_from([path for path, _ in PLACES]), st.sampled_from(VALUES)), max_size=3)
)
def test_models_and_schema_agree_but_for_the_rules_that_only_models_know(
    changes: list[tuple[Path, Any]],
) -> None:
    data = full()
    for path, value in changes:
        parent: Any = data
        try:
            for part in path[:-1]:
                parent = parent[part]
            parent[path[-1]] = copy.deepcopy(value)
        except (LookupError, TypeError):
            reject()  # an earlier change took the place away
    findings, refused = model_findings(data), list(refusals(ROOT, data))
    if not findings:
        assert refused == []
        assert list(refusals(SPEC, BagelDataset.from_mapping(data).to_mapping()["spec"])) == []
    elif not refused:
        assert set(findings) == {"value_error"}


# --- what the API server does with it -------------------------------------------------------------


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """`value` as the API server stores it."""
    if isinstance(value, list):
        return [with_defaults(schema["items"], item) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    stored = {}
    for name, below in schema["properties"].items():
        item = value.get(name, below.get("default"))
        if item is not None:
            stored[name] = with_defaults(below, item)
    return stored


def test_defaults_of_the_schema_are_those_of_the_models_and_move_no_hash() -> None:
    data = full()
    group = {key: data["spec"]["groups"][0][key] for key in ("name", "type", "imageTransform", "datasets")}
    data["spec"] = {"tokenizer": {"uri": "tokenizer.json"}, "groups": [group]}
    stored = with_defaults(ROOT, data)
    assert stored["spec"]["budgets"]["maxTokens"] == 36_864
    written, read = BagelDataset.from_mapping(data), BagelDataset.from_mapping(stored)
    assert read == written
    assert (spec_hash(read), config_hash(read)) == (spec_hash(written), config_hash(written))


def every_schema(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield schema
    children = [*schema.get("properties", {}).values()]
    children += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    for child in children:
        yield from every_schema(child)


def test_everything_is_typed_described_and_bounded() -> None:
    for schema in every_schema(ROOT):
        assert "x-kubernetes-preserve-unknown-fields" not in schema
        assert ("type" in schema) != ("x-kubernetes-int-or-string" in schema)
        if schema.get("type") == "array":
            assert "maxItems" in schema
            kind = schema["x-kubernetes-list-type"]
            assert kind == ("atomic" if "enum" in schema["items"] else "map")
        if "additionalProperties" in schema:
            assert "maxProperties" in schema
        for name, below in schema.get("properties", {}).items():
            assert below.get("description") or name == "metadata", name
    for schema in every_schema(SPEC):
        if "enum" not in schema and (schema.get("type") == "string" or "pattern" in schema):
            assert "maxLength" in schema


def test_units_are_in_the_descriptions() -> None:
    assert SPEC["properties"]["budgets"]["properties"]["maxTokens"]["description"].endswith("Unit: tokens.")


def test_columns_show_fields_that_the_status_has() -> None:
    status = build_object(DatasetStatus)["properties"]
    columns = VERSION["additionalPrinterColumns"]
    assert [column["name"].upper() for column in columns] == [
        "READY", "GROUPS", "ATTACHED", "STEP", "PACKS/S", "FILL", "AGE",
    ]  # fmt: skip
    for column in columns[1:-1]:
        assert column["jsonPath"].removeprefix(".status.") in status


def test_names_are_the_operators() -> None:
    crd = build_crd()
    assert crd["spec"]["group"] == naming.GROUP
    assert crd["spec"]["names"]["plural"] == naming.PLURAL
    assert VERSION["name"] == naming.VERSION
