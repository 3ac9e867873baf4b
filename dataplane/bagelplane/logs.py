"""How sidecar and producers log: text for people, or one JSON object a line for programs. Both go to stderr.

A JSON line has `time` (UTC), `level`, `logger` and `message`; `rank` and `step` where it is about one; and
`exception` with the traceback where there is one. `log_about` says what the lines of a task are about.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

from bagelplane.storage.uris import show

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "BAGELPLANE_LOG_FORMAT"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Subject = Callable[[], Mapping[str, int]]
"""Gives `rank` and `step` at the moment that a line is written."""


def _nothing() -> Mapping[str, int]:
    return {}


_subject: ContextVar[Subject] = ContextVar("log subject", default=_nothing)


def log_about(subject: Subject) -> None:
    """From here on, what this task logs is about `subject`. Tasks begun by it inherit that."""
    _subject.set(subject)


class TextFormatter(logging.Formatter):
    """A line for people. A name out of the data cannot break it, nor fake another."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (logging's own name)
        record.message = show(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, ASCII alone: whatever a message holds, it stays on its line."""

    def __init__(self, subject: Subject = _nothing) -> None:
        """`subject` is of the whole process; a task's goes before it."""
        super().__init__()
        self._of_process = subject

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._of_process(),
            **_subject.get()(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(
    level: int, form: LogFormat, *, text_format: str = TEXT_FORMAT, subject: Subject = _nothing
) -> None:
    """Ours from `level` on; of the libraries below, only what somebody should look at."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(subject) if form == "json" else TextFormatter(text_format))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("bagelplane").setLevel(level)
    if form == "json":
        logging.captureWarnings(True)
