"""What `bagelplane top` shows: rates between two statuses, what is wrong in words, and the frame made of both.

Pure: statuses come in as /v1/status gives them, and what is in them is trusted no further than its type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Status = Mapping[str, Any]

STALL_LIMIT = 0.05
"""Share of its time that a trainer may stand still for packs before it is a problem."""
AWAITED_LIMIT_SECONDS = 30.0
DROPS_LIMIT = 1.0
"""Rows dropped for each pack."""
_BAR_CELLS = 10


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank's line. Rates and shares are None where there is no second status to compare with."""

    status: Mapping[str, Any]
    packs_per_second: float | None = None
    tokens_per_second: float | None = None
    stall: float | None = None
    """Share of the time that the trainer stood still for packs."""
    wait: float | None = None
    """Share of the time that the ring was empty, whether the trainer asked or not."""
    busy: float | None = None
    """Share of the time that the producer worked."""
    decode: float | None = None
    storage: float | None = None
    """Shares of the producer's work, each of one thread's time: decoding by many may be above 1."""
    drops_per_pack: float | None = None
    restarted: bool = False
    """Whether its producer was started again meanwhile."""

    @property
    def label(self) -> str:
        return f"rank {self.status['rank']}"


def measure(before: Status | None, after: Status) -> list[RankView]:
    """The ranks of `after`, with what happened since `before`, unless that was another sidecar's."""
    seconds = 0.0
    if before is not None and before["started_unix_seconds"] == after["started_unix_seconds"]:
        seconds = after["uptime_seconds"] - before["uptime_seconds"]
    if before is None or seconds <= 0:
        return [RankView(rank) for rank in after["ranks"]]
    known = {rank["rank"]: rank for rank in before["ranks"]}
    return [
        _measure_rank(known[rank["rank"]], rank, seconds) if rank["rank"] in known else RankView(rank)
        for rank in after["ranks"]
    ]


def _measure_rank(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> RankView:
    def grown(name: str) -> float:
        return float(max(0, after[name] - before[name]))

    work = grown("work_seconds")
    packs = grown("packs_published")
    taken = grown("packs_acknowledged")
    # What goes on is in no sum yet.
    awaited = after["awaited_seconds"]
    wait = max(grown("trainer_wait_seconds"), awaited)
    stall = max(grown("trainer_stall_seconds"), 0.0 if taken else awaited)
    storage = max(0.0, after["storage"]["seconds"] - before["storage"]["seconds"])
    drops = _total(after["drops_here"]) - _total(before["drops_here"])
    return RankView(
        after,
        packs_per_second=taken / seconds,
        tokens_per_second=grown("tokens") / seconds,
        stall=min(1.0, stall / seconds),
        wait=min(1.0, wait / seconds),
        busy=min(1.0, work / seconds),
        decode=grown("decode_seconds") / work if work else None,
        storage=storage / work if work else None,
        drops_per_pack=drops / packs if packs else None,
        restarted=after["restarts"] > (0 if before["phase"] == "starting" else before["restarts"]),
    )


def _total(drops: Mapping[str, Mapping[str, int]]) -> int:
    return sum(count for reasons in drops.values() for count in reasons.values())


# --- problems -------------------------------------------------------------------------------------


def describe_problems(status: Status, ranks: Sequence[RankView]) -> list[str]:
    """What is wrong, the gravest first, and what to do about it."""
    found = [status["problem"]] if status["problem"] else []
    found += [f"{rank.label}: {rank.status['problem']}" for rank in ranks if rank.status["problem"]]
    found += _merge(ranks, _rank_problems)
    found += _snapshot_problems(status["snapshots"])
    attached = sum(rank.status["attached"] for rank in ranks)
    left = sum(not rank.status["attached"] and rank.status["packs_acknowledged"] > 0 for rank in ranks)
    if left:
        found.append(
            f"{left} of {status['expected_ranks']} trainers took packs and are not attached any more. Fix: if they are "
            "done, end the sidecar (SIGTERM, Ctrl-C); else look at their logs"
        )
    if attached + left < status["expected_ranks"]:
        found.append(
            f"{attached} of {status['expected_ranks']} trainers are attached. Fix: start them with BAGELPLANE_DIR "
            "set to the sidecar's directory, or say --ranks"
        )
    return found


def _merge(ranks: Sequence[RankView], problems: Any) -> Iterator[str]:
    """Each problem once, with the ranks that have it: eight ranks have most of theirs in common."""
    having: dict[str, list[str]] = {}
    for rank in ranks:
        for text in problems(rank):
            having.setdefault(text, []).append(str(rank.status["rank"]))
    for text, names in having.items():
        if 1 < len(names) == len(ranks):
            yield f"all ranks: {text}"
        else:
            yield f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}: {text}"


def _rank_problems(rank: RankView) -> Iterator[str]:
    status = rank.status
    if status["phase"] in ("failed", "stopped"):
        return
    if rank.restarted or status["phase"] == "starting":
        # Whatever else is to be seen comes of it.
        how = ", and was started again just now" if rank.restarted else ""
        fix = "if it comes again: the sidecar's log says why; if it was killed, more memory"
        yield f"{status['doing']}{how}. Fix, {fix}"
        return
    if status["awaited_seconds"] >= AWAITED_LIMIT_SECONDS:
        yield f"its trainer has had nothing to take for more than {AWAITED_LIMIT_SECONDS:g} s. {_cure(rank)}"
    elif rank.stall is not None and rank.stall > STALL_LIMIT and status["attached"]:
        if rank.wait is not None and rank.wait >= rank.stall / 2:
            yield f"the trainer waits for packs. {_cure(rank)}"
        else:
            yield (
                "packs are ready, and the trainer spends its time on converting them. Fix: have PackedLoader convert "
                "them on the device (device=), or further ahead (prefetch=)"
            )
    if rank.drops_per_pack is not None and rank.drops_per_pack > DROPS_LIMIT:
        yield f"more rows are dropped than packs made, {_main_drop(status['drops_here'])}"


def _cure(rank: RankView) -> str:
    if rank.storage is not None and rank.storage > 0.5:
        return "Reading takes most of the producer's time. Fix: look at the store's latency and the network"
    return (
        "Making them takes too long. Fix: more CPUs for the sidecar, and dataplane.decodeThreads to use them"
    )


def _main_drop(drops: Mapping[str, Mapping[str, int]]) -> str:
    _, group, reason = max(
        (count, group, reason) for group, row in drops.items() for reason, count in row.items()
    )
    return f"most of group {group} as {reason}. Fix: the sidecar's log names rows; look at `bagelplane plan`"


def _snapshot_problems(snapshots: Mapping[str, Any]) -> Iterator[str]:
    if snapshots["problem"]:
        yield f"snapshots: {snapshots['problem']}"
    elif snapshots["given_up"]:
        yield (
            f"{snapshots['given_up']} snapshots were given up, because the store was behind. Fix: look at the store, "
            "or raise snapshots.everySteps"
        )
    lineage = snapshots.get("lineage") or {}
    if lineage.get("problem"):
        yield f"log of rows: {lineage['problem']}"
    elif lineage.get("lost_packs"):
        yield f"the log of rows lacks {lineage['lost_packs']} packs, because the store was behind; they can be planned"


# --- the frame ------------------------------------------------------------------------------------


def render(status: Status, ranks: Sequence[RankView], *, now: float, seconds: float) -> RenderableType:
    """One frame. `now` is in seconds since the epoch; rates are of the last `seconds`."""
    problems = describe_problems(status, ranks)
    lines: list[RenderableType] = [_header(status, seconds), _rank_table(ranks), _snapshot_line(status, now)]
    if problems:
        lines += [Text(f"! {text}", style="bold yellow") for text in problems]
    else:
        lines.append(Text("all is well", style="green"))
    return Group(*lines)


def _header(status: Status, seconds: float) -> Text:
    world = status["world_size"]
    state = "ready" if status["ready"] else "not ready"
    parts = [
        f"{status['dataset']} ({status['spec_hash'][:12]})",
        f"up {format_seconds(status['uptime_seconds'])}",
        f"world size {world}" if world else "no trainer so far",
        state,
        f"rates of the last {seconds:.0f} s" if seconds else "rates with the next look",
    ]
    return Text(" · ".join(parts), style="bold")


def _rank_table(ranks: Sequence[RankView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rank", "phase", "step", "packs/s", "tokens/s", "fill", "ring", "stall", "busy", "drops"):
        left = name in ("phase", "ring")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for view in ranks:
        status = view.status
        # Text, not markup: names in a status are not ours.
        phase = status["phase"] if status["attached"] else f"{status['phase']}, no trainer"
        stalls = view.stall is not None and view.stall > STALL_LIMIT
        table.add_row(
            str(status["rank"]),
            escape(phase),
            f"{status['next_step']:,}",
            _number(view.packs_per_second),
            _number(view.tokens_per_second),
            _share(status["fill"]),
            _ring(status["ring"]),
            Text(_share(view.stall), style="red" if stalls else ""),
            _share(view.busy),
            f"{_total(status['drops_here']):,}",
        )
    return table


def _ring(ring: Mapping[str, Any]) -> str:
    used = ring["used_bytes"] / ring["capacity_bytes"] if ring["capacity_bytes"] else 0.0
    cells = min(_BAR_CELLS, round(used * _BAR_CELLS))
    return f"{'█' * cells}{'░' * (_BAR_CELLS - cells)} {ring['ready_packs']}"


def _snapshot_line(status: Status, now: float) -> Text:
    snapshots = status["snapshots"]
    if snapshots["uri"] is None:
        return Text("snapshots: none (spec.snapshots.uri is not set)")
    if snapshots["last_step"] is None:
        return Text(f"snapshots: none yet, {snapshots['waiting']} states waiting")
    age = format_seconds(max(0.0, now - snapshots["last_unix_seconds"]))
    return Text(
        f"snapshots: step {snapshots['last_step']:,}, {age} ago, written in {snapshots['last_write_seconds']:.2f} s; "
        f"{snapshots['completed']} complete, {snapshots['waiting']} states waiting"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def format_seconds(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
