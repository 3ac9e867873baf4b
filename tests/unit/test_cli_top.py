"""`bagelplane top`: rates, problems in words, frames, and what it says when nobody is there."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bagelplane.cli import top as top_module
from bagelplane.cli.app import main
from bagelplane.cli.top import fetch_from_socket, fetch_from_url
from bagelplane.cli.top_view import describe_problems, format_seconds, measure, render
from bagelplane.errors import ProtocolError
from bagelplane.sidecar.report import SidecarStatus

SECONDS = 10.0
NOW = 2_000_000_000.0


def make_status(ranks: int = 8) -> dict[str, Any]:
    """Of a sidecar that is well, in the documented form."""
    histogram = {"upper_bounds": [0.1], "counts": [0, 0]}
    rank = {
        "rank": 0, "phase": "ready", "phase_seconds": 5.0, "doing": "making step 101",
        "problem": "", "attached": True, "producer_pid": 10, "next_step": 100, "position": 100, "has_pack": True,
        "packs_published": 104, "packs_acknowledged": 100, "tokens": 3_000_000, "fill": 0.93, "images": 500,
        "pixel_bytes": 10**9, "work_seconds": 50.0, "decode_seconds": 40.0, "ring_wait_seconds": 10.0,
        "trainer_wait_seconds": 1.0, "awaited_seconds": 0.0, "trainer_stall_seconds": 2.0,
        "pack_seconds": histogram, "stall_seconds": histogram,
        "storage": {"seconds": 3.0, "read_bytes": 10**8, "requests": {"read": 100}, "retries": {}},
        "readers": [{"local_rank": 0, "attached": True, "client": "trainer", "next_step": 100, "behind": 0}],
        "readers_expected": 1,
        "restarts": 0, "ring": {"number": 0, "capacity_bytes": 1000, "used_bytes": 500, "ready_packs": 4, "epoch": 1},
        "drops": {}, "drops_here": {},
    }  # fmt: skip
    status = {
        "version": 1, "dataset": "bagel-sft", "spec_hash": "ab" * 32, "started_unix_seconds": 1000.0,
        "uptime_seconds": 60.0, "expected_ranks": ranks, "world_size": ranks, "ready": True, "problem": "",
        "ranks": [{**copy.deepcopy(rank), "rank": number} for number in range(ranks)],
        "known_bad_images": 0, "resampler": "native", "jpeg_decoder": "libjpeg-turbo",
        "snapshots": {
            "uri": "s3://bucket/snapshots", "last_step": 100, "last_position": 800,
            "last_unix_seconds": NOW - 90, "last_write_seconds": 0.25, "completed": 1, "failed": 0, "given_up": 0,
            "waiting": 0, "written_bytes": 10_000, "retries": {}, "problem": "",
        },
    }  # fmt: skip
    SidecarStatus.model_validate(status)
    return status


def later(status: dict[str, Any], *, ranks: Callable[[dict[str, Any]], None] | None = None) -> dict[str, Any]:
    """Ten seconds on: five packs and a second of stall a rank, and what `ranks` changes in each."""
    after = copy.deepcopy(status)
    after["uptime_seconds"] += SECONDS
    for rank in after["ranks"]:
        rank["packs_published"] += 5
        rank["packs_acknowledged"] += 5
        rank["tokens"] += 150_000
        rank["work_seconds"] += 8.0
        rank["trainer_stall_seconds"] += 0.1
        if ranks is not None:
            ranks(rank)
    return after


def frame_of(before: dict[str, Any] | None, after: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    seconds = 0.0 if before is None else SECONDS
    console.print(render(after, measure(before, after), now=NOW, seconds=seconds))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- frames


def test_a_frame_has_a_line_for_each_rank_with_its_rates() -> None:
    before = make_status()
    frame = frame_of(before, later(before))
    lines = [line for line in frame.splitlines() if " ready " in line and "█" in line]
    assert [line.split()[0] for line in lines] == [str(rank) for rank in range(8)]
    assert " ".join(lines[0].split()) == "0 ready 100 0.5 15,000 93 % █████░░░░░ 4 1 % 80 % 0"
    assert "bagel-sft (abababababab) · up 70 s · world size 8 · ready · rates of the last 10 s" in frame
    assert "snapshots: step 100, 90 s ago, written in 0.25 s; 1 complete" in frame
    assert frame.rstrip().endswith("all is well")


@pytest.mark.parametrize("change", [{"started_unix_seconds": 2000.0}, {"uptime_seconds": 60.0}])
def test_nothing_is_compared_with_another_sidecars_past(change: dict[str, float]) -> None:
    before = make_status(1)
    after = {**later(before), **change}
    (line,) = [line for line in frame_of(before, after).splitlines() if "█" in line]
    assert line.split()[3:5] == ["–", "–"]


def test_a_sidecar_without_trainers_is_shown_too() -> None:
    status = {**make_status(0), "world_size": None, "expected_ranks": 2}
    status["snapshots"] = {**status["snapshots"], "uri": None}
    frame = frame_of(None, status)
    assert "no trainer so far" in frame
    assert "0 of 2 trainers are attached" in frame
    assert "snapshots: none (spec.snapshots.uri is not set)" in frame


def test_trainers_that_ended_are_not_asked_to_start() -> None:
    status = {**make_status(2), "expected_ranks": 3}
    for rank in status["ranks"]:
        rank |= {"attached": False, "packs_acknowledged": 7}
    frame = " ".join(frame_of(None, status).split())
    assert "2 of 3 trainers took packs and are not attached any more. Fix: if they are done, end" in frame
    assert "0 of 3 trainers are attached. Fix: start them" in frame, "one never came"
    for rank in status["ranks"]:
        rank["attached"] = True
    assert "took packs and are not" not in frame_of(None, status)


def test_times_are_written_as_people_say_them() -> None:
    assert [format_seconds(seconds) for seconds in (0.4, 119, 120, 7199, 7200)] == [
        "0 s", "119 s", "2 min", "120 min", "2.0 h",
    ]  # fmt: skip


def test_the_live_view_outlives_its_sidecar_and_starts_over_with_the_next_one() -> None:
    first = make_status(1)
    second = later(first)
    restarted = {**make_status(1), "started_unix_seconds": 2000.0, "uptime_seconds": 1.0}
    answers = iter([second, ProtocolError("no sidecar at /run"), restarted, KeyboardInterrupt()])

    def fetch() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with pytest.raises(KeyboardInterrupt):
        top_module._watch(fetch, first, 0.001, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    moments = [shown.index(text) for text in ("next look", "last 10 s", "no sidecar at /run")]
    assert moments == sorted(moments)
    assert "next look" in shown[moments[-1] :], "rates begin anew"


# ---- problems


def problems_after(change: Callable[[dict[str, Any]], None]) -> list[str]:
    before = make_status(2)
    after = later(before, ranks=change)
    return describe_problems(after, measure(before, after))


def test_all_is_well_where_nothing_is_wrong() -> None:
    assert problems_after(lambda rank: None) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"phase": "failed", "problem": "group t2i gives nothing"}, "rank 0: group t2i gives nothing"),
        (
            {"trainer_stall_seconds": 6.0, "trainer_wait_seconds": 5.0, "work_seconds": 60.0},
            "all ranks: the trainer waits for packs. Making them takes too long. Fix: more CPUs for the sidecar",
        ),
        (
            {"trainer_stall_seconds": 6.0, "trainer_wait_seconds": 5.0, "storage": {"seconds": 11.0}},
            "all ranks: the trainer waits for packs. Reading takes most of the producer's time",
        ),
        ({"trainer_stall_seconds": 6.0}, "all ranks: packs are ready, and the trainer spends its time"),
        (
            {"awaited_seconds": 40.0, "trainer_stall_seconds": 12.0},
            "all ranks: its trainer has had nothing to take for more than 30 s. Making them takes too long",
        ),
        (
            {"phase": "starting", "doing": "the producer of rank 0 is starting again (exit status 1)"},
            "the producer of rank 0 is starting again (exit status 1). Fix, if it comes again: the sidecar's log",
        ),
        (
            {"restarts": 2, "trainer_stall_seconds": 8.0},
            "making step 101, and was started again just now. Fix",
        ),
        (
            {"drops_here": {"t2i": {"a": 1, "b": 9}}},
            "more rows are dropped than packs made, most of group t2i as b",
        ),
        ({"attached": False}, "2 of 2 trainers took packs and are not attached any more"),
    ],
)
def test_what_is_wrong_is_said_in_words(change: dict[str, Any], said: str) -> None:
    def apply(rank: dict[str, Any]) -> None:
        rank.update(change if "seconds" not in str(change.get("storage")) else {})
        if "storage" in change:
            rank.update({key: value for key, value in change.items() if key != "storage"})
            rank["storage"] = {**rank["storage"], **change["storage"]}

    assert any(said in text for text in problems_after(apply)), problems_after(apply)


def test_snapshots_that_fail_or_are_given_up_are_a_problem() -> None:
    before = make_status(1)
    after = later(before)
    after["snapshots"]["given_up"] = 3
    assert "3 snapshots were given up" in describe_problems(after, [])[0]
    after["snapshots"]["problem"] = "cannot write s3://bucket/x: access is denied"
    assert describe_problems(after, measure(before, after))[0].startswith("snapshots: cannot write")


# ---- nobody, nothing, something else


def run_top(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["top", "--once", "--interval", "0.1", *arguments])
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_without_a_sidecar_it_says_what_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, text = run_top(capsys, "--dir", str(tmp_path))
    assert (code, out) == (7, "")
    assert text == (
        f"error: no sidecar at {tmp_path}/sidecar.sock (No such file or directory). Fix: start one (bagelplane run "
        f"dataset.yaml --dir {tmp_path}), or give the --dir that it runs with\n"
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    code, _, text = run_top(capsys, "--url", f"http://127.0.0.1:{port}")
    assert code == 7
    assert "Connection refused" in text
    assert "--status-port PORT" in text
    assert run_top(capsys, "--url", "10.0.0.7:9780")[0] == 2


@contextlib.contextmanager
def serving(answer: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v1/status" else 404)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_one_frame_is_printed_of_what_a_status_port_says(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(make_status()).encode()) as url:
        code, out, _ = run_top(capsys, "--url", url)
    assert code == 0
    assert out.count("█") == 8 * 5


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b'{"version": 2, "ranks": []}', b"{}", b"[" * 100_000])
def test_what_is_no_status_is_refused_as_such(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(answer) as url:
        code, _, text = run_top(capsys, "--url", url)
    assert code == 7
    assert "is no sidecar of this release" in text
    with serving(b"", 500) as url, pytest.raises(ProtocolError, match="HTTP 500"):
        fetch_from_url(f"{url}/v1/status")


def test_a_sidecar_that_hangs_is_given_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_module, "ANSWER_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "sidecar.sock"))
        deaf.listen()
        with pytest.raises(ProtocolError, match="does not answer"):
            fetch_from_socket(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        pytest.raises(ProtocolError, match="does not answer"),
    ):
        fetch_from_url(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1/status")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@127.0.0.1:1",
        "user:secret@127.0.0.1",
        "ftp://user:secret@h",
        "http://user:secret/2@h",
    ],
)
def test_no_password_of_an_address_is_printed(capsys: pytest.CaptureFixture[str], url: str) -> None:
    code, out, err = run_top(capsys, "--url", url, "--once")
    assert code == 2
    assert "secret" not in out + err
