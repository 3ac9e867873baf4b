"""What a running sidecar tells: status, metrics, health, against what is documented."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bagelplane.client.reader import NumpyReader
from bagelplane.errors import BagelplaneError
from bagelplane.sidecar.metrics import METRICS, exposed_names
from bagelplane.sidecar.report import SidecarStatus
from tests.integration.sidecar_harness import (
    FAKE_STREAM,
    REPOSITORY,
    Process,
    Sidecar,
    fetch,
    free_port,
    make_dataset,
    processes_of,
    wait_for,
)

Start = Callable[..., tuple[Sidecar, int]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a sidecar with a status port in the test's folder; ended with it."""
    started: list[Sidecar] = []

    def start_one(
        *, snapshots: bool = False, every: int = 2, settings: Mapping[str, Any] | None = None, **orders: str
    ) -> Any:
        port = free_port()
        where = tmp_path / "snapshots" if snapshots else None
        # The log of rows too: each field and metric of it has to be there.
        dataset = make_dataset(snapshots=where, every=every, lineage=snapshots, **orders)
        sidecar = Sidecar(tmp_path, dataset, status_port=port, **(settings or {}))
        started.append(sidecar)
        sidecar.wait_serving()
        return sidecar, port

    yield start_one
    for sidecar in started:
        sidecar.kill()
    wait_for(lambda: not processes_of(tmp_path / "run"), "the end of all processes")


def status_of(port: int) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(fetch(port, "/v1/status")[1])
    return status


def samples_of(port: int) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of /metrics by name and labels."""
    text = fetch(port, "/metrics")[1]
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value_of(samples: Mapping[Any, float], name: str, **labels: str) -> float:
    return samples[f"bagelplane_{name}", tuple(sorted(labels.items()))]


# ---- the documented form


def documented_paths() -> set[str]:
    """Every field that docs/reference/status.md tells of."""
    page = (REPOSITORY / "docs/reference/status.md").read_text()
    paths: set[str] = set()
    for section in page.split("\n## ")[1:]:
        title, _, rows = section.partition("\n")
        parent = title.strip("`") + "." if title.startswith("`") else ""
        paths |= {parent + name for name in re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE)}
    return paths


# Tables whose keys are data: groups, reasons, operations, causes.
_TABLES = ("drops", "drops_here", "requests", "retries")


def told_paths(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every field of a status."""
    for name, content in value.items():
        yield prefix + name
        if isinstance(content, dict) and name not in _TABLES:
            yield from told_paths(content, f"{prefix}{name}.")
        elif isinstance(content, list) and content and isinstance(content[0], dict):
            yield from told_paths(content[0], f"{prefix}{name}[].")


def test_every_field_of_a_status_is_documented_and_every_documented_one_is_there(start: Start) -> None:
    sidecar, port = start(snapshots=True)
    before = status_of(port)
    SidecarStatus.model_validate(before)
    assert set(told_paths(before)) <= documented_paths()
    with sidecar.reader() as reader:
        for _ in range(6):
            reader.next_pack()
        wait_for(lambda: status_of(port)["snapshots"]["completed"], "a snapshot")
        for status in (status_of(port), reader.status()):
            SidecarStatus.model_validate(status)
            assert set(told_paths(status)) == documented_paths()


def test_a_rank_that_failed_tells_so_in_the_documented_form(start: Start) -> None:
    sidecar, port = start(fail_at="2")
    with sidecar.reader() as reader:
        reader.next_pack()
        reader.next_pack()
        with pytest.raises(BagelplaneError, match="gives nothing but drops"):
            reader.next_pack()
    status = status_of(port)
    SidecarStatus.model_validate(status)
    assert status["ranks"][0]["phase"] == "failed"
    assert "gives nothing but drops" in status["ranks"][0]["problem"]
    code, text = fetch(port, "/readyz")
    assert code == 503
    assert "gives nothing but drops" in json.loads(text)["problems"][0]


# ---- metrics


def test_all_metrics_are_exposed_and_none_besides(start: Start) -> None:
    sidecar, port = start(snapshots=True)
    with sidecar.reader() as reader:
        for _ in range(6):
            reader.next_pack()
        wait_for(lambda: status_of(port)["snapshots"]["completed"], "a snapshot")
    families = list(text_string_to_metric_families(fetch(port, "/metrics")[1]))
    assert {family.name for family in families} == set(METRICS)
    assert {family.name: family.documentation for family in families} == {
        name: doc.text for name, doc in METRICS.items()
    }
    for family in families:
        doc = METRICS[family.name]
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(doc.labels), sample
            assert sample.name in exposed_names(family.name, doc)
    without = {family.name for family in families if not family.samples}
    assert without <= {"bagelplane_storage_retries", "bagelplane_snapshot_retries"}, "nothing failed here"


def test_metrics_say_what_was_made_and_what_it_took(start: Start) -> None:
    sidecar, port = start(pack_seconds="0.03")
    with sidecar.reader() as reader:
        for _ in range(7):
            reader.next_pack()
        reader.status()  # an answer: what was sent before has arrived
        samples = samples_of(port)
        rank = status_of(port)["ranks"][0]
    assert value_of(samples, "packs_acknowledged_total", rank="0") == 7
    assert value_of(samples, "attached", rank="0") == 1
    assert value_of(samples, "pack_seconds_sum", rank="0") >= 7 * 0.03
    stalls = value_of(samples, "trainer_stall_seconds_bucket", rank="0", le="+Inf")
    assert stalls == value_of(samples, "trainer_stall_seconds_count", rank="0") == 7
    assert value_of(samples, "trainer_stall_seconds_sum", rank="0") >= 6 * 0.03, (
        "the trainer did nothing else"
    )
    assert value_of(samples, "read_bytes_total", rank="0") >= 7000
    assert value_of(samples, "storage_requests_total", rank="0", operation="read") >= 7
    assert value_of(samples, "decode_seconds_total", rank="0") > 0
    assert value_of(samples, "pixel_bytes_total", rank="0") > 0
    assert rank["ring"]["used_bytes"] <= rank["ring"]["capacity_bytes"]


def test_no_counter_goes_back_while_producers_die_and_trainers_move(start: Start) -> None:
    sidecar, port = start()
    counters = {
        name for key, doc in METRICS.items() if doc.kind != "gauge" for name in exposed_names(key, doc)
    }
    seen: dict[Any, float] = {}

    def look() -> None:
        now = {key: value for key, value in samples_of(port).items() if key[0] in counters}
        back = {key: (value, now[key]) for key, value in seen.items() if key in now and now[key] < value}
        assert not back
        seen.update(now)

    with sidecar.reader() as reader:
        for _ in range(9):
            reader.next_pack()
        look()
        reader.resume(step=3)  # another producer for the same rank
        for _ in range(3):
            reader.next_pack()
        look()
    with sidecar.reader(0, 2, resume="none") as first, sidecar.reader(1, 2, resume="none") as second:
        for reader in (first, second):
            reader.next_pack()
        look()
    assert value_of(seen, "packs_acknowledged_total", rank="0") == 13
    assert value_of(seen, "packs_acknowledged_total", rank="1") == 1
    assert value_of(seen, "drops_total", rank="0", group="t2i", reason="t2i_image_parse") > 0


# ---- queries over them

_FUNCTIONS = {"rate", "increase", "histogram_quantile", "sum", "avg", "max", "time"}
_WORDS = {"by", "ignoring", "group_left"}
_TARGET_LABELS = {"namespace", "pod"}  # docs/guides/observe.md has the scraper set them


def dashboard_queries() -> list[str]:
    board = json.loads((REPOSITORY / "charts/bagelplane/dashboards/bagelplane.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    return queries + [re.sub(r"label_values\((.*), (\w+)\)", r"sum by (\2) (\1)", text) for text in variables]


def alert_queries() -> list[str]:
    page = (REPOSITORY / "docs/guides/observe.md").read_text()
    (rules,) = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(groups:.*?)```", page, re.DOTALL)]
    queries = [rule["expr"] for rule in rules["groups"][0]["rules"]]
    assert len(queries) == 8
    return queries


def words_of(query: str) -> tuple[set[str], set[str]]:
    """(metrics and functions, labels) that a query names. Fails where its brackets do not match."""
    plain = re.sub(r"\[[\w$]+\]", "", re.sub(r'"[^"]*"', "", query))  # without strings and ranges
    open_brackets: list[str] = []
    for sign in plain:
        if sign in "({":
            open_brackets.append(sign)
        elif sign in ")}":
            assert open_brackets, query
            assert open_brackets.pop() + sign in ("()", "{}"), query
    assert not open_brackets, query
    lists = r"\{([^}]*)\}|\b(?:by|ignoring)\s*\(([^)]*)\)"
    labels = {word for found in re.findall(lists, plain) for word in re.findall(r"[a-z_]+", " ".join(found))}
    return set(re.findall(r"[a-z_]+[a-z0-9_]*", re.sub(lists, "", plain))) - _WORDS, labels


def test_every_query_of_dashboard_and_alerts_asks_for_what_a_sidecar_exposes(start: Start) -> None:
    sidecar, port = start(snapshots=True)
    with sidecar.reader() as reader:
        for _ in range(6):
            reader.next_pack()
        wait_for(lambda: status_of(port)["snapshots"]["completed"], "a snapshot")
    labels_of: dict[str, set[str]] = {}
    for name, labels in samples_of(port):
        labels_of.setdefault(name, set()).update(key for key, _ in labels)
    # Where nothing failed there is no sample; that the family is exposed is another test's claim.
    labels_of.setdefault("bagelplane_storage_retries_total", {"rank", "cause"})
    labels_of.setdefault("bagelplane_snapshot_retries_total", {"cause"})
    for query in [*dashboard_queries(), *alert_queries()]:
        words, labels = words_of(query)
        metrics = words - _FUNCTIONS
        assert metrics, query
        assert metrics <= set(labels_of), query
        assert labels <= set().union(*(labels_of[name] for name in metrics)) | _TARGET_LABELS, query


@pytest.mark.parametrize(
    "query",
    [
        'rate(bagelplane_packs_total{pod="a"}[5m])',
        "sum by (rang) (bagelplane_ready)",
        "median(bagelplane_ready)",
        'bagelplane_ready{rnk="0"}',
    ],
)
def test_a_query_for_something_else_is_noticed(query: str) -> None:
    words, labels = words_of(query)
    assert words - _FUNCTIONS - {"bagelplane_ready"} or labels - _TARGET_LABELS - {"rank"}


# ---- health


def test_a_sidecar_is_ready_before_its_trainers_and_not_while_one_waits_for_its_first_pack(
    start: Start,
) -> None:
    sidecar, port = start(pack_seconds="1.5", settings={"local_ranks": 2})
    assert fetch(port, "/healthz") == (200, '{"alive": true}')
    code, text = fetch(port, "/readyz")
    assert code == 200, "or the kubelet would never start the trainer that it waits for"
    assert json.loads(text) == {
        "ready": True, "expected_ranks": 2, "attached_ranks": 0, "ranks_without_a_pack": [], "problems": [],
    }  # fmt: skip
    with sidecar.reader(0, 2) as reader:
        answers = []

        def starting() -> bool:
            answers.append(fetch(port, "/readyz"))
            return answers[-1][0] == 503

        attached = wait_in_thread(reader.next_pack)
        wait_for(starting, "a rank without a pack")
        assert json.loads(answers[-1][1])["ranks_without_a_pack"] == [0]
        attached()
        code, text = fetch(port, "/readyz")
        assert code == 200
        assert json.loads(text)["attached_ranks"] == 1


def wait_in_thread(action: Callable[[], object]) -> Callable[[], None]:
    """Begins it, and gives what waits for its end."""
    thread = threading.Thread(target=action)
    thread.start()
    return lambda: thread.join(30)


# ---- logs


def run_program(tmp_path: Path, *arguments: str, **orders: str) -> Process:
    """`bagelplane run` on the fake stream, as a person starts it."""
    resource = tmp_path / "dataset.json"
    resource.write_text(
        json.dumps(make_dataset(snapshots=tmp_path / "snapshots", every=2, **orders).to_mapping())
    )
    fixed = ("--dir", str(tmp_path / "run"), "--stream-factory", FAKE_STREAM)
    return Process(tmp_path / "log", "bagelplane.cli.app", "run", str(resource), *fixed, *arguments)


def log_lines(process: Process) -> list[dict[str, Any]]:
    """Each line as what it has to be: a JSON object."""
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    return lines


def test_a_log_of_json_has_one_object_a_line_with_rank_and_step_from_producers_too(tmp_path: Path) -> None:
    process = run_program(tmp_path, "--log-format", "json")
    try:
        wait_for((tmp_path / "run/sidecar.sock").is_socket, "the socket", 120)
        with NumpyReader(tmp_path / "run", timeout_seconds=120) as reader:
            reader.resume(step=5)
            for _ in range(4):
                reader.next_pack()
        process.popen.terminate()
        assert process.wait(60) == 0
        lines = log_lines(process)
    finally:
        process.kill()
    planned = [line for line in lines if line["logger"] == "bagelplane.sidecar.producer"]
    assert {(line["rank"], line["step"]) for line in planned} == {(0, 5)}, planned
    complete = [line for line in lines if "is complete" in line["message"]]
    assert (complete[0]["rank"], complete[0]["step"]) == (0, 6)
    (attached,) = [line for line in lines if "attached at step 5" in line["message"]]
    assert (attached["rank"], attached["step"]) == (0, 5)


def test_what_ends_a_sidecar_is_a_line_of_its_log_of_json(tmp_path: Path) -> None:
    process = run_program(tmp_path, "--log-format", "json", refuse="there are no files")
    try:
        assert process.wait(120) == 5
        last = log_lines(process)[-1]
    finally:
        process.kill()
    assert last["level"] == "critical"
    assert "there are no files" in last["message"]
    assert "Fix: another resource" in last["message"]


# ---- top


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_top_shows_eight_ranks_of_a_running_sidecar(start: Start) -> None:
    sidecar, port = start(snapshots=True, every=50, pack_seconds="0.05", settings={"local_ranks": 8})
    ending = threading.Event()

    def train(rank: int) -> None:
        with sidecar.reader(rank, 8, timeout_seconds=300.0) as reader:
            while not ending.is_set():
                reader.next_pack()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: min_acknowledged(port) >= 3, "packs of all ranks", 300)
        wait_for(lambda: status_of(port)["snapshots"]["completed"], "a snapshot", 300)
        for where in (["--dir", str(sidecar.directory)], ["--url", f"http://127.0.0.1:{port}"]):
            command = [sys.executable, "-m", "bagelplane.cli.app", "top", "--once", *where]
            frame = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
            print(frame)
            rows = [line.split() for line in frame.splitlines() if "░" in line or "█" in line]
            assert [row[:2] for row in rows] == [[str(rank), "ready"] for rank in range(8)]
            assert "world size 8 · ready" in frame
            assert "snapshots: step" in frame
    finally:
        ending.set()
        for thread in threads:
            thread.join(60)


def min_acknowledged(port: int) -> int:
    counts = [rank["packs_acknowledged"] for rank in status_of(port)["ranks"]]
    return min(counts) if len(counts) == 8 else 0
