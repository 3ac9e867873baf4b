"""`bagelplane top`: a running sidecar, live in the terminal."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bagelplane import __version__
from bagelplane.cli.top_view import measure, render
from bagelplane.errors import BagelplaneError, ProtocolError, SpecError
from bagelplane.shm.protocol import (
    PROTOCOL_VERSION,
    SIDECAR_MESSAGES,
    SOCKET_NAME,
    Error,
    Hello,
    Message,
    MessageSocket,
    StatusRequest,
    Welcome,
)
from bagelplane.shm.protocol import Status as StatusMessage
from bagelplane.sidecar.report import STATUS_VERSION
from bagelplane.sidecar.rundir import DIRECTORY_VARIABLE, default_directory

ANSWER_SECONDS = 5.0
WINDOW_SECONDS = 30.0
"""Rates are of so long at most: a pack may take seconds, and each look comes after one or two."""
MAX_STATUS_BYTES = 4 * 1024 * 1024
_PIPE_COLUMNS = 120

Status = dict[str, Any]


def top(
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            envvar=DIRECTORY_VARIABLE,
            help="Run directory of the sidecar on this machine.",
            show_default="/dev/shm/bagelplane-<uid>",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Its status port instead, for example http://10.0.0.7:9780 (kubectl port-forward POD 9780).",
            show_default=False,
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end, for logs.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60.0, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Watch a running sidecar: ranks, rates, rings, stalls, snapshots, and what is wrong in words.

    stall is the share of its time that a trainer stands still for packs, busy that of its producer's work; ring is
    what is ready for it, in the ring's size and in packs. Ctrl-C ends it. Where stdout is no terminal, it prints one
    frame, as with --once.

    Examples:

        bagelplane top

        bagelplane top --url http://127.0.0.1:9780 --once
    """
    fetch = _choose_source(directory, url)
    console = Console(highlight=False)
    first = fetch()  # nobody there: an error, and no empty screen
    with contextlib.suppress(KeyboardInterrupt):
        if once or not console.is_terminal:
            _print_once(fetch, first, interval)
        else:
            _watch(fetch, first, interval, console)


def _print_once(fetch: Callable[[], Status], first: Status, interval: float) -> None:
    time.sleep(interval)
    status = fetch()
    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    console.print(render(status, measure(first, status), now=time.time(), seconds=interval))


def _watch(fetch: Callable[[], Status], first: Status, interval: float, console: Console) -> None:
    """Until Ctrl-C. A sidecar that goes away may come back: it is asked again and again."""
    looks: deque[Status] = deque([first])
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            last = looks[-1]
            seconds = last["uptime_seconds"] - looks[0]["uptime_seconds"]
            ranks = measure(looks[0] if len(looks) > 1 else None, last)
            live.update(render(last, ranks, now=time.time(), seconds=seconds), refresh=True)
            time.sleep(interval)
            try:
                status = fetch()
            except BagelplaneError as error:
                live.update(Text(f"{error}", style="bold red"), refresh=True)
                continue
            if status["started_unix_seconds"] != last["started_unix_seconds"]:
                looks.clear()
            looks.append(status)
            while looks[-1]["uptime_seconds"] - looks[0]["uptime_seconds"] > WINDOW_SECONDS:
                looks.popleft()


# --- where the status comes from ------------------------------------------------------------------


def _choose_source(directory: Path | None, url: str | None) -> Callable[[], Status]:
    if url is None:
        return lambda: fetch_from_socket(directory or default_directory())
    if "@" in url:
        # Nothing before it is said: messages get into logs, and a password may hold any sign.
        raise SpecError(
            "--url carries a name or a password",
            got=f"...@{url.rpartition('@')[2]}",
            expected="an address alone: the status port asks for neither",
        )
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise SpecError(
            "--url is no address",
            got=repr(url),
            expected="for example http://127.0.0.1:9780",
        )
    address = url if parts.path.strip("/") else f"{url.rstrip('/')}/v1/status"
    return lambda: fetch_from_url(address)


def fetch_from_socket(directory: Path) -> Status:
    """The status by the sidecar's own socket. ProtocolError when nobody answers in time."""
    path = (directory if directory.name != SOCKET_NAME else directory.parent) / SOCKET_NAME
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(ANSWER_SECONDS)
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        raise ProtocolError(
            f"no sidecar at {path} ({error.strerror or error})",
            fix=f"start one (bagelplane run dataset.yaml --dir {directory}), or give the --dir that it runs with",
        ) from None
    messages = MessageSocket(sock, SIDECAR_MESSAGES)
    try:
        deadline = time.monotonic() + ANSWER_SECONDS
        messages.send(
            Hello(PROTOCOL_VERSION, f"bagelplane top {__version__}"), timeout_seconds=ANSWER_SECONDS
        )
        _receive(messages, Welcome, deadline)
        messages.send(StatusRequest(), timeout_seconds=ANSWER_SECONDS)
        answer = _receive(messages, StatusMessage, deadline)
        assert isinstance(answer, StatusMessage)
        return _checked(answer.status, str(path))
    except OSError as error:
        raise _silent(str(path), str(error)) from None
    finally:
        messages.close()


def _receive(messages: MessageSocket, kind: type[Message], deadline: float) -> Message:
    message = messages.receive(timeout_seconds=deadline - time.monotonic())
    if isinstance(message, Error):
        raise ProtocolError(message.message, fix=message.fix)
    if not isinstance(message, kind):
        raise TimeoutError(f"{ANSWER_SECONDS:g} s passed")
    return message


def fetch_from_url(url: str) -> Status:
    """The status by HTTP. ProtocolError when nobody answers in time, or something else than a status."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            body = answer.read(MAX_STATUS_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            raise _foreign(url, f"HTTP {error.code}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise _silent(url, str(reason)) from None
        raise ProtocolError(
            f"no sidecar at {url} ({reason})",
            fix="start one (bagelplane run dataset.yaml --status-port PORT), or correct --url",
        ) from None
    try:
        return _checked(json.loads(body), url)
    except (ValueError, RecursionError):
        raise _foreign(url, "no JSON") from None


def _checked(status: Any, where: str) -> Status:
    if not isinstance(status, dict) or status.get("version") != STATUS_VERSION or "ranks" not in status:
        found = f"version {status.get('version')!r}" if isinstance(status, dict) else type(status).__name__
        raise _foreign(where, found)
    return status


def _silent(where: str, cause: str) -> ProtocolError:
    return ProtocolError(
        f"the sidecar at {where} does not answer ({cause})",
        fix="look at its log; it may be stopped, or its machine out of CPU",
    )


def _foreign(where: str, got: str) -> ProtocolError:
    return ProtocolError(
        f"what answers at {where} is no sidecar of this release",
        got=got,
        expected=f"a status of version {STATUS_VERSION}",
        fix="correct the address, or use the same release on both sides",
    )
