"""Logs for programs: one JSON object a line, whatever is logged, with rank and step of whom it is about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bagelplane.logs import JsonFormatter, TextFormatter, log_about


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a logger of its own writes through the formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test_logs")
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_stays_one_line_whatever_it_holds(lines: io.StringIO) -> None:
    logger = logging.getLogger("test_logs")
    for text in ('"quoted"', "two\nlines\r\n", "\u2028 and \udcff", "\x00"):
        logger.warning("%s", text)
    try:
        raise ValueError("of\nours")
    except ValueError:
        logger.exception("it failed")
    found = parsed(lines)
    assert [line["message"] for line in found[:4]] == [
        '"quoted"',
        "two\nlines\r\n",
        "\u2028 and \udcff",
        "\x00",
    ]
    assert found[4]["level"] == "error"
    assert "ValueError: of\nours" in found[4]["exception"]
    assert set(found[0]) == {"time", "level", "logger", "message"}
    assert found[0]["time"].endswith("Z")


def test_each_task_logs_about_its_own_rank_as_it_is_at_that_moment(lines: io.StringIO) -> None:
    logger = logging.getLogger("test_logs")

    async def serve(rank: int) -> None:
        step = 0
        log_about(lambda: {"rank": rank, "step": step})
        for step in (1, 2):  # noqa: B007  (the subject reads it)
            await asyncio.sleep(0)
            logger.warning("rank %d", rank)

    async def serve_both() -> None:
        await asyncio.gather(serve(0), serve(1))
        logger.warning("nobody's")

    asyncio.run(serve_both())
    found = parsed(lines)
    assert sorted((line["rank"], line["step"]) for line in found[:-1]) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert all(line["message"] == f"rank {line['rank']}" for line in found[:-1])
    assert "rank" not in found[-1]


def test_a_name_out_of_the_data_breaks_no_line_for_people() -> None:
    name = "part\n2026-01-01 ERROR bagelplane: made up\x1b[2J\udcff.parquet"
    record = logging.LogRecord("x", logging.WARNING, "x.py", 1, "dropped: %s", (name,), None)
    told = TextFormatter("%(levelname)s %(message)s").format(record)
    assert told == r"WARNING dropped: part\n2026-01-01 ERROR bagelplane: made up\x1b[2J\udcff.parquet"
