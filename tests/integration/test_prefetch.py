"""Packs that are converted ahead change nothing of what a trainer may rely on."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagelplane.client import NumpyReader
from bagelplane.engine.layout import assemble
from bagelplane.engine.pack import Pack
from bagelplane.errors import DataError, ProtocolError, SpecError
from bagelplane.shm.protocol import Error, Published, Snapshotted
from tests.integration.fake_sidecar import FakeSidecar, make_pack, same
from tests.integration.sidecar_harness import (
    DEADLINE_SECONDS,
    Sidecar,
    digest,
    make_dataset,
    undisturbed,
    wait_for,
)

PACKS_IN_THE_RING = 3
"""What the fake sidecar keeps unreleased."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, directory: Path, **options: Any) -> FakeSidecar:
    sidecar = FakeSidecar(directory, **options)
    stack.callback(sidecar.crash)
    return sidecar


def connect(stack: ExitStack, directory: Path, prefetch: int = 2, **options: Any) -> NumpyReader:
    options = {"rank": 0, "world_size": 1, "timeout_seconds": DEADLINE_SECONDS, **options}
    return stack.enter_context(NumpyReader(directory, prefetch=prefetch, **options))


class Conversions:
    """A conversion that tells which packs it was asked for, on which threads."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.fail_at = fail_at

    def __call__(self, pack: Pack, images: Any) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        self.steps.append(pack.step)
        if pack.step == self.fail_at:
            raise ZeroDivisionError(f"step {pack.step}")
        return assemble(pack, images)

    def wait_for(self, step: int) -> None:
        wait_for(lambda: step in self.steps, f"the conversion of step {step}")


def converting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bagelplane-convert")]


def take_until_prefetched(reader: NumpyReader, convert: Conversions, first: int, depth: int) -> int:
    """Takes packs from `first` on until `depth` more are converted ahead; the number of the next one."""
    for step in range(first, first + 200):
        assert same(reader.take(convert), assemble(*make_pack(step)))
        if len(reader._ahead) == depth:
            convert.wait_for(step + depth)
            return step + 1
        reader.status()  # doorbells arrive meanwhile
    raise AssertionError(f"{depth} packs were never ahead; the last look saw {len(reader._ahead)}")


def test_packs_are_converted_by_another_thread_before_they_are_asked_for(
    tmp_path: Path, stack: ExitStack
) -> None:
    serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions()
    take_until_prefetched(reader, convert, 0, 2)
    assert convert.threads == {"bagelplane-convert_0"}
    assert sorted(set(convert.steps)) == convert.steps, "each once, in order"


def test_without_prefetch_the_callers_thread_converts_and_there_is_no_other(
    tmp_path: Path, stack: ExitStack
) -> None:
    serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path, prefetch=0), Conversions()
    for _ in range(5):
        reader.take(convert)
    assert convert.threads == {threading.current_thread().name}
    assert convert.steps == [0, 1, 2, 3, 4]
    assert converting_threads() == []


def test_what_is_prefetched_is_in_no_state_and_not_acknowledged(tmp_path: Path, stack: ExitStack) -> None:
    sidecar = serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions()
    next_step = take_until_prefetched(reader, convert, 0, 2)
    assert reader.step == reader.position == next_step
    state = reader.state_dict()
    assert (state["step"], json.loads(state["state"])) == (next_step, make_pack(next_step - 1)[0].state)
    assert reader.snapshot() == Snapshotted(next_step, "s3://bucket/snapshots")
    assert sidecar.acknowledged == list(range(next_step))
    assert [record.step for record in sidecar.ring.unreleased()][:2] == [next_step, next_step + 1]


def test_prefetched_packs_are_thrown_away_by_a_loaded_state_a_resume_and_a_close(
    tmp_path: Path, stack: ExitStack
) -> None:
    serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions()
    next_step = take_until_prefetched(reader, convert, 0, 2)
    state = reader.state_dict()
    reader.resume(step=40)
    assert same(reader.take(convert), assemble(*make_pack(40)))
    take_until_prefetched(reader, convert, 41, 2)
    reader.load_state_dict(state)
    assert converting_threads() == []
    next_step = take_until_prefetched(reader, convert, next_step, 2)
    reader.close()
    assert converting_threads() == []
    assert reader.step == next_step
    assert same(reader.take(convert), assemble(*make_pack(next_step)))


def test_what_a_conversion_raises_is_raised_at_its_place_and_the_pack_is_tried_again(
    tmp_path: Path, stack: ExitStack
) -> None:
    sidecar = serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions(fail_at=4)
    for step in range(4):
        assert same(reader.take(convert), assemble(*make_pack(step)))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="step 4"):
            reader.take(convert)
    assert reader.step == 4
    convert.fail_at = None
    assert [same(reader.take(convert), assemble(*make_pack(step))) for step in (4, 5)] == [True, True]
    reader.status()
    assert sidecar.acknowledged == [0, 1, 2, 3, 4, 5]


def test_a_pack_converted_for_another_use_is_converted_again(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions()
    step = take_until_prefetched(reader, convert, 0, 2)
    pack, images = reader.next_pack()
    assert pack.step == step
    assert same(images, make_pack(step)[1])
    assert same(next(reader), assemble(*make_pack(step + 1)))


def test_an_error_of_the_sidecar_waits_until_the_packs_before_it_are_handed_over(
    tmp_path: Path, stack: ExitStack
) -> None:
    def fail_after_two(message: Published) -> Any:
        # The packs before it are announced; then comes the error, on the same connection.
        return message if message.step < 2 else Error("data", "group t2i gives nothing but drops", "look")

    serve(stack, tmp_path, change=fail_after_two)
    reader, convert = connect(stack, tmp_path), Conversions()
    assert same(reader.take(convert), assemble(*make_pack(0)))

    def trouble() -> bool:
        record = reader._connection.ready_record()
        if record is not None:
            reader._ahead.append(*record, convert)
        return reader._connection._trouble is not None

    wait_for(trouble, "the error to arrive while step 1 is not handed over")
    assert same(reader.take(convert), assemble(*make_pack(1)))
    with pytest.raises(DataError, match=r"nothing but drops\. Fix: look"):
        reader.take(convert)


def test_a_conversion_that_never_ends_is_an_error_at_the_deadline(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    release = threading.Event()
    stack.callback(release.set)
    reader = connect(stack, tmp_path, timeout_seconds=0.3)
    stack.callback(release.set)  # before the reader closes: it waits for its thread
    with pytest.raises(ProtocolError, match=r"0\.3 s for the conversion of step 0.*prefetch=0"):
        reader.take(lambda pack, images: release.wait(DEADLINE_SECONDS))


@pytest.mark.parametrize("prefetch", [-1, 1.5, "2", True, None])
def test_a_prefetch_that_is_no_number_of_packs_is_refused(tmp_path: Path, prefetch: Any) -> None:
    with pytest.raises(SpecError, match="prefetch must be a number of packs"):
        NumpyReader(tmp_path, prefetch=prefetch)


def test_the_thread_ends_with_a_reader_that_nobody_closed(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    reader = NumpyReader(tmp_path, prefetch=1, timeout_seconds=DEADLINE_SECONDS)
    next(reader)
    assert converting_threads()
    del reader
    gc.collect()
    wait_for(lambda: not converting_threads(), "the thread to end")


LEFT_OPEN = """
import sys, threading
from bagelplane.client import NumpyReader
reader = NumpyReader(sys.argv[1], prefetch=2, timeout_seconds=60)
for _ in range(3):
    next(reader)
print([thread.name for thread in threading.enumerate()])
"""


def test_the_thread_ends_with_the_interpreter(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LEFT_OPEN, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "bagelplane-convert_0" in done.stdout


# ---- the sidecar dies


def test_the_stream_goes_on_when_the_sidecar_restarts_over_prefetched_packs(
    tmp_path: Path, stack: ExitStack
) -> None:
    sidecar = serve(stack, tmp_path)
    reader, convert = connect(stack, tmp_path), Conversions()
    step = 0
    for _ in range(4):
        step = take_until_prefetched(reader, convert, step, 2)
        sidecar.crash()
        sidecar = serve(stack, tmp_path)  # knows nothing, and writes over what was prefetched
    assert same(reader.take(convert), assemble(*make_pack(step)))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_sidecar_and_a_new_reader_leave_the_stream_as_it_was(tmp_path: Path) -> None:
    dataset = make_dataset(snapshots=tmp_path / "snapshots", every=4)
    expected = undisturbed(dataset, 0, 1, 40)
    seen: list[str] = []
    saved: dict[str, Any] | None = None
    for until in (17, 40):
        sidecar = Sidecar(tmp_path, dataset)
        try:
            sidecar.wait_serving()
            with sidecar.reader(prefetch=3, timeout_seconds=DEADLINE_SECONDS * 4) as reader:
                if saved is not None:
                    reader.load_state_dict(saved)
                while len(seen) < until:
                    if len(seen) == until - 5:  # in mid-stream, with packs ahead
                        sidecar.kill()
                        sidecar = Sidecar(tmp_path, dataset)
                    seen.append(digest(*reader.next_pack()))
                    saved = reader.state_dict()
                    assert saved["step"] == len(seen)
        finally:
            sidecar.kill()
    assert seen == expected


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("next"), st.integers(1, 5)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("load"), st.integers(0, 3)),
        st.tuples(st.just("resume"), st.integers(0, 30)),
        st.tuples(st.just("close"), st.just(0)),
        st.tuples(st.just("raw"), st.just(0)),
        st.tuples(st.just("crash"), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(ACTIONS, st.integers(1, 4))
def test_any_sequence_of_calls_gives_the_same_with_and_without_prefetch(
    actions: list[tuple[str, int]], prefetch: int
) -> None:
    assert played(actions, prefetch) == played(actions, 0)


def played(actions: list[tuple[str, int]], prefetch: int) -> list[Any]:
    """All that a trainer sees, and what was acknowledged in the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory = Path(folder)
        sidecars = [serve(stack, directory)]
        reader = connect(stack, directory, prefetch)
        seen: list[Any] = []
        saved = [reader.state_dict()]
        for action, number in actions:
            if action == "next":
                seen += [digest_of(next(reader)) for _ in range(number)]
            elif action == "save":
                saved.append(reader.state_dict())
            elif action == "load":
                reader.load_state_dict(saved[number % len(saved)])
            elif action == "resume":
                reader.resume(step=number)
            elif action == "close":
                reader.close()
            elif action == "raw":
                seen.append(digest(*reader.next_pack()))
            else:
                reader.status()  # its answer comes after the acknowledgements, which a crash may lose or not
                sidecars[-1].crash()
                sidecars.append(serve(stack, directory, unacknowledged=sidecars[-1].unacknowledged))
            seen.append((action, reader.step, reader.position, reader.state_dict()))
        reader.status()
        return [*seen, sidecars[-1].unacknowledged]


def digest_of(batch: dict[str, Any]) -> str:
    from tests.golden.hashing import describe
    from tests.golden.hashing import digest as golden_digest

    return golden_digest(describe(batch))


@pytest.mark.parametrize("where", ["ready_record", "release"])
def test_an_interrupt_while_a_pack_is_handed_over_does_not_lose_it(
    where: str, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(stack, tmp_path)
    reader = connect(stack, tmp_path)
    taken = [reader.next_pack()[0].step]
    connection = reader._connection
    inner = connection._receive if where == "ready_record" else connection._require_socket

    def interrupt(*arguments: Any) -> Any:
        monkeypatch.setattr(connection, inner.__name__, inner)
        raise KeyboardInterrupt

    connection._doorbells.clear()
    monkeypatch.setattr(connection, inner.__name__, interrupt)
    with pytest.raises(KeyboardInterrupt):
        taken.extend(pack.step for pack, _ in reader.packs())
    assert reader.step == len(taken)
    taken += [reader.next_pack()[0].step for _ in range(4)]
    assert taken == list(range(len(taken)))


def test_a_forked_child_is_told_and_its_parent_goes_on(tmp_path: Path, stack: ExitStack) -> None:
    serve(stack, tmp_path)
    reader = connect(stack, tmp_path, prefetch=0)
    assert reader.next_pack()[0].step == 0
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            reader.next_pack()
            said = "a pack"
        except ProtocolError as error:
            said = str(error)
        reader.close()
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answers:
        assert "in a forked child" in answers.read()
    os.waitpid(child, 0)
    assert [reader.next_pack()[0].step for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), 1e12, "5"])
def test_a_time_that_cannot_be_waited_is_refused_at_once(seconds: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="timeout_seconds"):
        NumpyReader(tmp_path, timeout_seconds=seconds)
