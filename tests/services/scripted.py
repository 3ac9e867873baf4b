"""An HTTP server that gives the answers a test asks for: errors, cut bodies, stalls."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `body_bytes_sent`: the connection is cut after so many; `stalls`: nothing comes until the
    end.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    body_bytes_sent: int | None = None
    stalls: bool = False


def s3_error(status: int, code: str, headers: Mapping[str, str] | None = None) -> Answer:
    """An S3 error as servers send it; the text holds what must not reach a message."""
    text = "<Message>AKIA-SECRET-TEXT</Message><AWSAccessKeyId>AKIA-SECRET-TEXT</AWSAccessKeyId>"
    return Answer(status, f"<Error><Code>{code}</Code>{text}</Error>".encode(), headers or {})


class ScriptedServer:
    """Answers in turn; the last answer is given for ever. `requests` holds "GET /path" lines, in order."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers, self._lock, self.requests = list(answers), threading.Lock(), list[str]()
        self.access_keys = list[str]()
        self.is_over = threading.Event()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                answer = scripted._next(self.command, self.path, self.headers.get("Authorization") or "")
                if answer.stalls:
                    scripted.is_over.wait(60)
                    self.close_connection = True
                    return
                body = b"" if self.command == "HEAD" else answer.body
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(answer.body)))
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[: answer.body_bytes_sent])
                self.close_connection = answer.body_bytes_sent is not None

            do_GET = do_HEAD = do_PUT = do_DELETE = _answer  # noqa: N815 (the base class asks for these names)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (named by the base)
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def _next(self, method: str, path: str, authorization: str) -> Answer:
        with self._lock:
            self.requests.append(f"{method} {path}")
            self.access_keys.append(authorization.partition("Credential=")[2].partition("/")[0])
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@contextmanager
def serve_answers(*answers: Answer) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answers)
    server.start()
    try:
        yield server
    finally:
        server.stop()
