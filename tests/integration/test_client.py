"""What a trainer may rely on: its batches, its place in the stream, and never a hang."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from bagelplane.client import NumpyReader, PackedLoader, connection
from bagelplane.engine.layout import assemble
from bagelplane.errors import DataError, ProtocolError, RingError, SnapshotError, SpecError, StorageError
from bagelplane.shm.protocol import SOCKET_NAME, Error, Resume, Snapshotted, Waiting
from tests.integration.fake_sidecar import FakeSidecar, make_pack, same

TIMEOUT_SECONDS = 20.0


def expected(step: int) -> dict[str, Any]:
    return assemble(*make_pack(step))


@pytest.fixture(autouse=True)
def no_ranks_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "BAGELPLANE_DIR", "BAGELPLANE_GENERATION"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, directory: Path, **options: Any) -> FakeSidecar:
    sidecar = FakeSidecar(directory, **options)
    stack.callback(sidecar.crash)
    return sidecar


def connect(stack: ExitStack, directory: Path, **options: Any) -> PackedLoader:
    loader = PackedLoader(directory, **{"timeout_seconds": TIMEOUT_SECONDS, **options})
    stack.callback(loader.close)
    return loader


# ---- batches


def test_batches_are_the_yielded_mapping_as_tensors(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    for step in range(6):
        batch, wanted = next(loader), expected(step)
        assert same(batch, wanted), step
        for key, value in wanted.items():
            assert isinstance(batch[key], torch.Tensor if isinstance(value, np.ndarray) else type(value)), key
        assert type(batch["patchified_vae_latent_shapes"][0]) is tuple
        if "nested_attention_masks" in batch:
            assert {mask.dtype for mask in batch["nested_attention_masks"]} == {torch.float32}
        assert batch["padded_images"].dtype == torch.float32
        assert batch["packed_text_ids"].dtype == torch.int64


def test_the_numpy_reader_gives_the_same_and_the_raw_packs(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    with NumpyReader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as reader:
        assert same(next(reader), expected(0))
        pack, images = reader.next_pack()
        wanted, wanted_images = make_pack(1)
        assert same(pack.arrays, wanted.arrays)
        assert same(images, wanted_images)
        assert pack.state == wanted.state
        assert same(next(iter(reader.packs()))[1], make_pack(2)[1])


def test_a_batch_does_not_change_when_its_slot_is_used_again(tmp_path: Path, stack: ExitStack) -> None:
    sidecar = serve(stack, tmp_path)
    with NumpyReader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as reader:
        raw = [reader.next_pack() for _ in range(12)]
    loader = connect(stack, tmp_path, resume="none")
    batches = [next(loader) for _ in range(12)]
    assert sidecar.ring.capacity_bytes < 12 * raw[0][0].arrays["packed_text_ids"].nbytes + 12 * 60_000
    for step, batch in enumerate(batches):
        assert same(batch, expected(step)), step
        assert same(raw[step][1], make_pack(step)[1]), step
        batch["padded_images"].add_(1)  # and the caller may write into it


def test_a_batch_lies_on_the_device_asked_for(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    # torch loads much at the first use of this device.
    batch = next(connect(stack, tmp_path, device="meta", timeout_seconds=TIMEOUT_SECONDS * 5))
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    assert tensors
    assert {tensor.device.type for tensor in [*tensors, *batch["nested_attention_masks"]]} == {"meta"}


def test_each_pack_is_acknowledged_once_when_handed_over(tmp_path: Path, stack: ExitStack) -> None:
    sidecar = serve(stack, tmp_path)
    with connect(stack, tmp_path) as loader:
        for _ in range(5):
            next(loader)
        loader.status()  # an answer: what was sent before has arrived
        assert sidecar.acknowledged == [0, 1, 2, 3, 4]
    assert sidecar.detached.wait(TIMEOUT_SECONDS)


def test_a_second_loop_continues_after_the_first(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    seen = []
    for _ in range(2):
        for batch in loader:
            seen.append(batch["batch_data_indexes"][0]["data_indexes"][0])
            if len(seen) % 3 == 0:
                break
    assert seen == [0, 1, 2, 3, 4, 5]


def test_step_is_the_number_of_the_pack_that_comes_next(stack: ExitStack, tmp_path: Path) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    steps = [loader.step]
    for _ in range(2):
        next(loader)
        steps.append(loader.step)
    loader.resume(step=7)
    assert [*steps, loader.step] == [0, 1, 2, 7]
    assert loader.step == loader.state_dict()["step"]


# ---- place in the stream


def test_state_after_each_pack_gives_the_same_suffix(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    states = [loader.state_dict()]
    for _ in range(4):
        next(loader)
        states.append(loader.state_dict())
    loader.close()
    for step, state in enumerate(states):
        assert state["step"] == step
        with PackedLoader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as restored:
            restored.load_state_dict(json.loads(json.dumps(state)))
            assert restored.state_dict() == state
            assert [same(next(restored), expected(step + more)) for more in range(2)] == [True, True]


def test_state_keeps_its_keys_and_kinds_from_before_the_first_pack_on(
    tmp_path: Path, stack: ExitStack
) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    before = loader.state_dict()
    next(loader)
    after = loader.state_dict()
    assert {key: type(value) for key, value in before.items()} == {
        key: type(value) for key, value in after.items()
    }
    assert {type(value) for value in after.values()} <= {int, str}


# torch warns that it saves in a single process; that is what is wanted here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_distributed_checkpoint_restores_a_fresh_loader(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    with connect(stack, tmp_path) as loader:
        for _ in range(3):
            next(loader)
        dcp.save({"data": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    fresh = connect(stack, tmp_path, resume="none")
    dcp.load({"data": fresh}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert same(next(fresh), expected(3))


def test_resume_goes_to_any_step(tmp_path: Path, stack: ExitStack) -> None:
    sidecar = serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    next(loader)
    loader.resume(step=40)
    assert same(next(loader), expected(40))
    loader.resume(step=7)
    assert loader.state_dict()["step"] == 7
    assert same(next(loader), expected(7))
    assert [attach.resume for attach in sidecar.attaches][1:] == [Resume("step", 40), Resume("step", 7)]


def test_a_new_trainer_process_continues_with_the_next_unacknowledged_pack(
    tmp_path: Path, stack: ExitStack
) -> None:
    serve(stack, tmp_path)
    with PackedLoader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as first:
        next(first)
        next(first)
        first.status()
    assert same(next(connect(stack, tmp_path)), expected(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1}, "another rank; got rank 1 of 4; expected rank 0 of 4"),
        ({"version": 2}, "got version 2"),
        ({"step": -1}, "damaged"),
        ({"step": "3"}, "damaged"),
        ({"state": "{"}, "damaged"),
        ({"state": 5}, "damaged"),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    loader = PackedLoader(tmp_path, rank=0, world_size=4)
    state = {"version": 1, "step": 3, "rank": 0, "world_size": 4, "spec_hash": "hash", "state": "{}"}
    with pytest.raises(SnapshotError, match=message):
        loader.load_state_dict({**state, **change})


@pytest.mark.parametrize("state", [[], "x", 5, None, {}])
def test_what_is_no_state_at_all_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(SnapshotError, match=r"the loaded state is (no mapping|not one of PackedLoader)"):
        PackedLoader(tmp_path, rank=0, world_size=4).load_state_dict(state)


@pytest.mark.parametrize(("loaded", "told"), [("that", "that"), ("this", "")])
def test_of_a_state_of_another_data_set_the_sidecar_decides(
    tmp_path: Path, stack: ExitStack, loaded: str, told: str
) -> None:
    sidecar = serve(stack, tmp_path, spec_hash="this")
    loader = connect(stack, tmp_path)
    state = {"version": 1, "step": 3, "rank": 0, "world_size": 1, "spec_hash": loaded, "state": ""}
    loader.load_state_dict(state)
    next(loader)
    assert sidecar.attaches[-1].spec_hash == told
    assert loader.state_dict()["spec_hash"] == "this"


def test_a_snapshot_covers_what_was_handed_over(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    for _ in range(3):
        next(loader)
    assert loader.snapshot() == Snapshotted(3, "s3://bucket/snapshots")
    assert loader.status() == {"unacknowledged": 3}
    assert same(next(loader), expected(3))


def test_a_refused_snapshot_is_told_at_once_and_the_stream_goes_on(tmp_path: Path, stack: ExitStack) -> None:
    sidecar = serve(stack, tmp_path)
    sidecar.snapshot_answer = Error("snapshot", "no snapshots.uri is set", "set it", fatal=False)
    loader = connect(stack, tmp_path)
    next(loader)
    with pytest.raises(SnapshotError, match=r"no snapshots\.uri is set\. Fix: set it"):
        loader.snapshot()
    assert same(next(loader), expected(1))


# ---- the sidecar dies


def test_the_stream_goes_on_when_the_sidecar_restarts(tmp_path: Path, stack: ExitStack) -> None:
    first = serve(stack, tmp_path)
    loader = connect(stack, tmp_path)
    assert [same(next(loader), expected(step)) for step in range(3)] == [True] * 3
    first.crash()
    second = serve(stack, tmp_path)  # knows nothing of the first
    assert [same(next(loader), expected(step)) for step in range(3, 6)] == [True] * 3
    assert second.ring.epoch > first.ring.epoch
    (attach,) = second.attaches
    assert attach.resume == Resume("state", 3, make_pack(2)[0].state)


def test_a_pack_that_was_overwritten_while_it_was_read_is_read_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    sidecars = [serve(stack, tmp_path)]
    with NumpyReader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as reader:
        seen: list[int] = []

        def convert(pack: Any, images: Any) -> dict[str, Any]:
            seen.append(pack.step)
            if len(seen) == 3:
                sidecars[-1].crash()
                sidecars.append(serve(stack, tmp_path))  # a new epoch, over the bytes that we look at
                raise ValueError("what torn bytes might lead to")
            return assemble(pack, images)

        assert all(same(reader.take(convert), expected(step)) for step in range(4))
        assert seen == [0, 1, 2, 2, 3]


def test_a_failure_to_convert_is_the_callers_own(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    with NumpyReader(tmp_path, timeout_seconds=TIMEOUT_SECONDS) as reader:
        with pytest.raises(ZeroDivisionError):
            reader.take(lambda pack, images: 1 // 0)
        # The pack was not taken: the next attempt gets it.
        reader.close()
        assert same(next(reader), expected(0))


def test_a_rank_that_is_still_held_is_asked_for_again(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    busy = Error("busy", "another trainer holds rank 0", "end it", fatal=False)
    sidecar = serve(stack, tmp_path, on_attach=lambda number: [busy] if number < 3 else [])
    assert same(next(connect(stack, tmp_path)), expected(0))
    assert len(sidecar.attaches) == 3
    assert "another trainer holds rank 0" in caplog.text


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("storage", StorageError),
        ("data", DataError),
        ("snapshot", SnapshotError),
        ("spec", SpecError),
        ("ring", RingError),
        ("generation", ProtocolError),
        ("a code of tomorrow", ProtocolError),
    ],
)
def test_a_fatal_error_is_raised_with_its_fix(
    tmp_path: Path, stack: ExitStack, code: str, kind: type[Exception]
) -> None:
    fatal = Error(code, "no such bucket: s3://b", "create it")
    serve(stack, tmp_path, on_attach=lambda number: [fatal])
    with pytest.raises(kind, match=r"no such bucket: s3://b\. Fix: create it"):
        next(connect(stack, tmp_path))


# ---- waits


def test_no_sidecar_at_all_is_an_error_that_names_the_socket(tmp_path: Path, stack: ExitStack) -> None:
    with pytest.raises(
        ProtocolError,
        match=rf"0\.2 s for the next pack of rank 0.*no sidecar at {tmp_path}.*Fix: start the sidecar",
    ):
        next(connect(stack, tmp_path, timeout_seconds=0.2))


def test_a_sidecar_that_is_not_there_is_said_while_it_is_waited_for_and_again(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BAGELPLANE_DIR", "/run/elsewhere")
    monkeypatch.setattr(connection, "_ABSENT_SECONDS", 0.05)
    monkeypatch.setattr(connection, "_ABSENT_AGAIN_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING), pytest.raises(ProtocolError):
        next(connect(stack, tmp_path, timeout_seconds=2.0))
    texts = [record.getMessage() for record in caplog.records]
    assert 2 <= len(texts) <= 10
    for text in texts:
        assert f"rank 0: no sidecar at {tmp_path}/sidecar.sock (No such file or directory) for" in text
        assert "waiting up to 2 s" in text
        assert f"bagelplane run --dir {tmp_path}" in text
        assert "BAGELPLANE_DIR, which is /run/elsewhere here" in text


def test_a_sidecar_that_comes_at_once_is_no_reason_to_warn(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    serve(stack, tmp_path)
    with caplog.at_level(logging.WARNING):
        next(connect(stack, tmp_path))
    assert caplog.records == []


def test_a_pack_that_does_not_come_is_an_error_that_says_what_the_sidecar_was_doing(
    tmp_path: Path, stack: ExitStack
) -> None:
    waiting = Waiting("reading s3://bucket/a.parquet", 12.0)
    serve(stack, tmp_path, publish=False, unacknowledged=12, on_attach=lambda number: [waiting])
    with pytest.raises(ProtocolError, match=r"step 12.*reading s3://bucket/a\.parquet"):
        next(connect(stack, tmp_path, timeout_seconds=0.5))


def test_a_sidecar_that_is_stopped_is_an_error_at_the_deadline(tmp_path: Path, stack: ExitStack) -> None:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(tmp_path / SOCKET_NAME))
    listener.listen()  # the kernel accepts, nobody answers
    with pytest.raises(ProtocolError, match=r"0\.2 s.*connected to"):
        next(connect(stack, tmp_path, timeout_seconds=0.2))


def test_the_next_attempt_after_a_deadline_gets_its_pack(tmp_path: Path, stack: ExitStack) -> None:
    loader = connect(stack, tmp_path, timeout_seconds=0.5)
    with pytest.raises(ProtocolError):
        next(loader)
    serve(stack, tmp_path)
    assert same(next(loader), expected(0))


# ---- a sidecar that errs


def test_a_step_left_out_is_an_error(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path, change=lambda bell: replace(bell, step=bell.step + 1))
    with pytest.raises(ProtocolError, match="left a step out; got step 1; expected step 0"):
        next(connect(stack, tmp_path))


def test_a_doorbell_for_something_else_is_a_ring_error(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path, change=lambda bell: replace(bell, offset_bytes=bell.offset_bytes + 64))
    with pytest.raises(RingError):
        next(connect(stack, tmp_path))


def test_garbage_from_the_socket_is_a_protocol_error(tmp_path: Path, stack: ExitStack) -> None:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(tmp_path / SOCKET_NAME))
    listener.listen()
    reader = NumpyReader(tmp_path, timeout_seconds=TIMEOUT_SECONDS)
    stack.callback(reader.close)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ProtocolError, match="too many bytes"):
        next(reader)
    thread.join(TIMEOUT_SECONDS)


# ---- who we are


def test_ranks_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGELPLANE_DIR", str(tmp_path))
    for name, value in {"RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 8, "BAGELPLANE_GENERATION": 3}.items():
        monkeypatch.setenv(name, str(value))
    place = NumpyReader().place
    assert (place.rank, place.local_rank, place.world_size, place.generation) == (5, 1, 8, 3)
    place = NumpyReader(rank=2, world_size=4).place
    assert (place.rank, place.local_rank, place.world_size) == (2, 1, 4)


def test_ranks_come_from_torch_distributed_when_it_is_initialised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    place = PackedLoader(tmp_path).place
    assert (place.rank, place.local_rank, place.world_size) == (3, 3, 4)


@pytest.mark.parametrize(
    "options",
    [{"rank": 2, "world_size": 2}, {"rank": -1}, {"rank": "0"}, {"timeout_seconds": 0}, {"resume": "newest"}],
)
def test_impossible_arguments_are_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        PackedLoader(tmp_path, **options)


def test_a_rank_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SpecError, match="RANK is no number; got 'first'"):
        NumpyReader()


def test_the_client_loads_nothing_that_decodes_or_stores() -> None:
    code = (
        "import sys, bagelplane.client as client; client.NumpyReader\n"
        "assert 'torch' not in sys.modules\n"
        "client.PackedLoader\n"
        "heavy = {'PIL', 'pyarrow', 'fsspec', 'pydantic', 's3fs', 'aiohttp', 'tokenizers', 'zstandard'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
