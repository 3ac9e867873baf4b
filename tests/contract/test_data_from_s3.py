"""Packs made of data on a real S3 server, through a network that is slow or fails: the same as from local files, or an
error that names the object. Every request is accounted for.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bagelplane.settings
from bagelplane.demo_data import Recipe, make_data_set
from bagelplane.engine.pack import Pack
from bagelplane.errors import BagelplaneError, StorageError, TransientStorageError
from bagelplane.spec import BagelDataset
from bagelplane.storage import StorageSettings, open_storage, retries
from bagelplane.stream import open_rank_stream
from bagelplane.topology import Topology
from tests.services.proxy import Broken, Proxy, Request, serve_proxy
from tests.services.s3 import S3Server, serve_versitygw
from tests.services.scripted import Answer, s3_error

pytestmark = pytest.mark.timeout(900)  # the first use may build versitygw

RECIPE = Recipe(
    files=2, row_groups=2, rows=4, distinct_pictures=12, megapixels=(0.02, 0.05), with_faults=True
)
PACKS = 6
READ_TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class World:
    """Data on disk and in a bucket behind a proxy, and what packs of it are."""

    folder: Path
    server: S3Server
    proxy: Proxy
    prefix: str
    expected: list[str]

    def resource(self, **storage: Any) -> BagelDataset:
        text = json.dumps(resource_of(self.folder))
        made = json.loads(text.replace(str(self.folder), f"s3://{self.server.bucket}/{self.prefix}"))
        credentials = str(self.server.credentials_dir)
        made["spec"]["storage"] = {"endpointURL": self.proxy.url, "credentialsDir": credentials, **storage}
        return BagelDataset.from_mapping(made)

    def uri(self, name: str) -> str:
        return f"s3://{self.server.bucket}/{self.prefix}/{name}"


def resource_of(folder: Path) -> dict[str, Any]:
    vae, vit = {"stride": 16, "maxSize": 256, "minSize": 64}, {"stride": 14, "maxSize": 224, "minSize": 56}
    vlm = {"name": "vlm", "uri": f"{folder}/vlm", "jsonl": "train.jsonl", "images": "images/"}
    return {
        "apiVersion": "bagelplane.io/v1alpha1",
        "kind": "BagelDataset",
        "metadata": {"name": "from-s3"},
        "spec": {
            "tokenizer": {"uri": f"{folder}/tokenizer.json"},
            "groups": [
                {
                    "name": "t2i", "type": "t2i_pretrain", "mandatory": True, "imageTransform": vae,
                    "datasets": [{"name": "t2i", "uri": f"{folder}/t2i"}],
                },
                {
                    "name": "edit", "type": "unified_edit", "imageTransform": vae, "vitImageTransform": vit,
                    "datasets": [{"name": "edit", "uri": f"{folder}/edit"}],
                },
                {
                    "name": "vlm", "type": "vlm_sft", "shuffleLines": True, "imageTransform": vit,
                    "datasets": [vlm],
                },
            ],
            "budgets": {
                "expectedTokens": 1000, "maxTokens": 1400, "maxTokensPerSample": 900, "preferBufferBefore": 500,
                "maxBufferSize": 5,
            },
            "sharding": {"mode": "Bagel", "workersPerRank": 0},
        },
    }  # fmt: skip


def packs_of(dataset: BagelDataset, count: int = PACKS, **options: Any) -> list[str]:
    """Digests of the packs, pixels included."""
    with closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=1, **options)) as stream:
        return take(stream, count)


def take(stream: Any, count: int) -> list[str]:
    digests = []
    for _ in range(count):
        images: list[np.ndarray] = []

        def allocate(pack: Pack, images: list[np.ndarray] = images) -> list[np.ndarray]:
            images[:] = [np.zeros((*shape, 3), np.uint8) for shape in pack.image_shapes]
            return images

        pack = stream.next_pack(allocate)
        hashed = hashlib.sha256(json.dumps([pack.step, pack.scalars]).encode())
        for array in [*(array for _, array in sorted(pack.arrays.items())), *images]:
            hashed.update(array.tobytes())
        digests.append(hashed.hexdigest()[:16])
    return digests


def put_all(folder: Path, server: S3Server, prefix: str) -> None:
    storage = open_storage(server.settings)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        storage.write_bytes(f"s3://{server.bucket}/{prefix}/{path.relative_to(folder)}", path.read_bytes())


def add_unused_column(path: Path) -> None:
    """A large column between those that are read."""
    table = pq.read_table(path)
    rng = np.random.default_rng(0)
    unused = pa.array([rng.bytes(50_000) for _ in range(table.num_rows)], pa.binary())
    table = table.add_column(1, "unused", unused)
    pq.write_table(table, path, row_group_size=RECIPE.rows, compression="NONE", use_dictionary=False)


@pytest.fixture(scope="module")
def whole_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("data")
    make_data_set(folder, RECIPE)
    for path in folder.glob("t2i/*.parquet"):
        add_unused_column(path)
    expected = packs_of(BagelDataset.from_mapping(resource_of(folder)))
    with serve_versitygw(tmp_path_factory.mktemp("s3")) as server, serve_proxy(server.url) as proxy:
        put_all(folder, server, "data")
        yield World(folder, server, proxy, "data", expected)


@pytest.fixture
def world(whole_world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """With quick tries, and a clean proxy."""
    monkeypatch.setattr(retries, "_FIRST_PAUSE_SECONDS", 0.002)
    real = bagelplane.settings.storage_settings

    def quick(*arguments: Any) -> StorageSettings:
        return replace(real(*arguments), read_timeout_seconds=READ_TIMEOUT_SECONDS)

    monkeypatch.setattr(bagelplane.settings, "storage_settings", quick)
    whole_world.proxy.requests.clear()
    yield whole_world
    whole_world.proxy.fault = lambda request: None
    whole_world.proxy.latency_seconds = 0.0


def test_packs_are_those_of_local_files_and_every_request_is_accounted_for(world: World) -> None:
    world.proxy.latency_seconds = 0.02
    assert packs_of(world.resource()) == world.expected
    asked = Counter(
        (request.method, unquote(request.target), request.range) for request in world.proxy.requests
    )
    # The lists are shorter than what was packed: images come round again, and so do row groups.
    lists = {target: count for (_, target, _), count in asked.items() if "list-type" in target}
    assert list(lists.values()) == [1, 1], lists
    assert {target.rpartition("/")[2] for (method, target, _), _ in asked.items() if method == "HEAD"} == {
        "train.jsonl"
    }
    tails = [key for key in asked if key[1].endswith(".parquet")]
    assert tails
    for path in world.folder.glob("t2i/*.parquet"):
        ranges = [key[2] for key in asked if key[1].endswith(f"t2i/{path.name}")]
        assert not touched(path, "unused", ranges), f"{path.name}: {ranges}"
        assert touched(path, "image", ranges)


def touched(path: Path, column: str, ranges: list[str]) -> bool:
    """Whether one of the ranges reaches into a column, beyond the window in which the footer lies."""
    metadata, window = pq.read_metadata(path), path.stat().st_size - 64 * 1024
    for number in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            chunk = metadata.row_group(number).column(place)
            if chunk.path_in_schema != column:
                continue
            begin, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
            for text in ranges:
                first, _, last = text.removeprefix("bytes=").partition("-")
                if int(first) != window and int(first) < end and begin <= int(last):
                    return True
    return False


@pytest.mark.parametrize("limits", [{"requests": 0}, {"size": 1}, {"requests": 1, "size": "1Mi"}])
def test_packs_do_not_depend_on_what_is_read_ahead(world: World, limits: dict[str, Any]) -> None:
    assert packs_of(world.resource(readAhead=limits)) == world.expected


# --- faults ------------------------------------------------------------------------------------------

RESET = Broken(cut_after_bytes=0)
FAULTS = {
    "500": Broken(s3_error(500, "InternalError")),
    "502": Broken(Answer(502, b"<html>bad gateway")),
    "503": Broken(s3_error(503, "SlowDown")),
    "504": Broken(Answer(504, b"")),
    "429": Broken(s3_error(429, "TooManyRequests")),
    "cut at once": RESET,
    "cut in the middle": Broken(cut_after_bytes=700),
    "stalled": Broken(stall_after_bytes=700),
    "dripping": Broken(drip_seconds=0.5),
}


def is_list(request: Request) -> bool:
    return "list-type" in request.target


def is_footer(request: Request) -> bool:
    # The first thing that is read of a Parquet file is its end.
    return ".parquet" in request.target and request.method == "GET"


def is_image(request: Request) -> bool:
    return ".jpg" in request.target


def is_lines(request: Request) -> bool:
    return request.target.endswith(".jsonl") and request.method == "GET"


PLACES: dict[str, Callable[[Request], bool]] = {
    "open": is_list, "parquet": is_footer, "image": is_image, "lines": is_lines
}  # fmt: skip


def break_each(world: World, is_meant: Callable[[Request], bool], broken: Broken, times: int) -> list[int]:
    """Each different request of a kind goes wrong so many times, then works. The list grows with each fault."""
    seen: Counter[tuple[str, str, str]] = Counter()
    happened: list[int] = []

    def fault(request: Request) -> Broken | None:
        key = (request.method, request.target, request.range)
        if not is_meant(request) or seen[key] >= times:
            return None
        seen[key] += 1
        happened.append(request.number)
        return broken

    world.proxy.fault = fault
    return happened


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["503", "cut in the middle"])
@pytest.mark.parametrize("times", [1, 5])
def test_a_fault_that_passes_costs_nothing_but_time(world: World, kind: str, place: str, times: int) -> None:
    happened = break_each(world, PLACES[place], FAULTS[kind], times)
    with closing(open_rank_stream(world.resource(), Topology(0, 1, 0), decode_threads=1)) as stream:
        assert take(stream, PACKS) == world.expected
        retried = sum(stream.costs.as_json()["retries"].values())
    assert happened
    # Counted once each; those of parts that were still on their way at the end may be missing.
    assert 0 < retried <= len(happened)


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_once_on_parquet(world: World, kind: str) -> None:
    broken = FAULTS[kind]
    budget = threading.Semaphore(2)
    happened: list[Request] = []

    def fault(request: Request) -> Broken | None:
        # A few of them: each stall takes its time.
        if is_footer(request) and budget.acquire(blocking=False):
            happened.append(request)
            return broken
        return None

    world.proxy.fault = fault
    assert packs_of(world.resource()) == world.expected
    assert happened


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_that_lasts_is_a_named_error(world: World, place: str) -> None:
    break_each(world, PLACES[place], FAULTS["503"], 10**9)
    with pytest.raises(TransientStorageError, match=r"SlowDown \(HTTP 503\)") as caught:
        packs_of(world.resource())
    name = {"open": "/t2i", "parquet": ".parquet", "image": ".jpg", "lines": "train.jsonl"}[place]
    assert name in str(caught.value)
    assert world.proxy.url in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (s3_error(403, "AccessDenied"), "access is denied"),
        (s3_error(404, "NoSuchBucket"), "no such bucket"),
        (s3_error(403, "SignatureDoesNotMatch"), "credentials are wrong"),
        (s3_error(403, "RequestTimeTooSkewed"), "clock"),
        (s3_error(301, "PermanentRedirect", {"x-amz-bucket-region": "us-west-2"}), "us-west-2"),
        (s3_error(400, "ExpiredToken"), "expired"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("place", ["parquet", "image"])
def test_what_lasts_is_named_at_its_place_within_seconds(
    world: World, answer: Answer, said: str, place: str
) -> None:
    break_each(world, PLACES[place], Broken(answer), 10**9)
    began = time.monotonic()
    with pytest.raises(StorageError, match=said) as caught:
        packs_of(world.resource())
    assert not isinstance(caught.value, TransientStorageError)
    assert f"s3://{world.server.bucket}/data/" in str(caught.value)
    assert time.monotonic() - began < 20


def test_what_fails_ahead_of_need_ends_no_pack_before_it(world: World) -> None:
    """The image of a later pack is denied: packs before it come, and the error names it."""
    names: list[str] = []
    world.proxy.fault = lambda request: names.append(request.target) if is_image(request) else None
    plain = world.resource(readAhead={"requests": 0})
    with closing(open_rank_stream(plain, Topology(0, 1, 0), decode_threads=0)) as stream:
        before = []
        while len(before) < PACKS and not names:
            before += take(stream, 1)
        first = set(names)
        while set(names) == first:  # until an image comes that the packs so far did not need
            assert len(before) < 50, f"of {len(first)} images none came after the first packs"
            before += take(stream, 1)
    denied = next(name for name in names if name not in first)
    good = len(before) - 1
    world.proxy.fault = lambda request: (
        Broken(s3_error(403, "AccessDenied")) if request.target == denied else None
    )
    with closing(open_rank_stream(world.resource(), Topology(0, 1, 0), decode_threads=1)) as stream:
        assert take(stream, good) == before[:good]
        with pytest.raises(StorageError, match=unquote(denied).rpartition("/")[2]):
            take(stream, 2)


def test_a_store_that_is_away_is_waited_for_and_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_LONGEST_PAUSE_SECONDS", 0.05)
    said: list[str] = []
    is_away = threading.Event()
    world.proxy.fault = lambda request: FAULTS["503"] if is_away.is_set() else None
    limits = {"requests": 2, "size": 1}
    stream = open_rank_stream(
        world.resource(readAhead=limits), Topology(0, 1, 0), decode_threads=1, on_wait=said.append
    )
    with closing(stream):
        digests = take(stream, 1)
        is_away.set()
        threading.Timer(1.5, is_away.clear).start()
        digests += take(stream, PACKS - 1)
    assert digests == world.expected
    assert "SlowDown" in said[0], said
    assert said[-1] == ""


# --- objects that are replaced ------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [{}, {"requests": 0}], ids=["ahead", "on demand"])
def test_a_replaced_object_is_named_and_never_mixed(
    world: World, tmp_path: Path, ahead: dict[str, Any]
) -> None:
    put_all(world.folder, world.server, "replaced")
    dataset = replace(world, prefix="replaced").resource(readAhead={"size": 1, **ahead})
    storage = open_storage(world.server.settings)
    with closing(open_rank_stream(dataset, Topology(0, 1, 0), decode_threads=1)) as stream:
        digests = take(stream, 1)
        for path in world.folder.glob("edit/*.parquet"):
            table = pq.read_table(path).slice(1)
            pq.write_table(table, tmp_path / path.name, row_group_size=RECIPE.rows)
            uri = f"s3://{world.server.bucket}/replaced/edit/{path.name}"
            storage.write_bytes(uri, (tmp_path / path.name).read_bytes())
        with pytest.raises(BagelplaneError, match=r"edit/chunk-\d+\.parquet.*was changed since") as caught:
            digests.extend(pack for _ in range(4 * PACKS) for pack in take(stream, 1))
    assert isinstance(caught.value, StorageError)
    assert digests[:PACKS] == world.expected[: len(digests)]
