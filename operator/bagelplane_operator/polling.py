"""Asks sidecars for their status: a few at a time, each for a short while, reading no more than a bounded answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

import aiohttp

from bagelplane_operator import naming
from bagelplane_operator.attachments import Poll, TrainerPod, parse_status

POLL_SECONDS = 2.0
MAX_ANSWER_BYTES = 1 << 20
MAX_AT_ONCE = 128


class Poller:
    """Use it as an asynchronous context manager."""

    def __init__(self, port: int = naming.STATUS_PORT) -> None:
        self._port = port
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # No proxy of the environment: these are addresses of pods. A connection is not worth keeping for 5 s.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=POLL_SECONDS),
            connector=aiohttp.TCPConnector(limit=MAX_AT_ONCE, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def poll(self, pods: Iterable[TrainerPod]) -> dict[str, Poll]:
        """What came of asking each pod that has an address, by uid. Raises nothing that a pod could cause."""
        asked = [pod for pod in pods if pod.active and pod.address]
        polls = await asyncio.gather(*(self._ask(pod) for pod in asked))
        return {pod.uid: poll for pod, poll in zip(asked, polls, strict=True)}

    async def _ask(self, pod: TrainerPod) -> Poll:
        try:
            async with self._at_once:
                return Poll(parse_status(await self._fetch(pod.address)))
        except ValueError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"nothing within {POLL_SECONDS:g} s"
        except aiohttp.ClientConnectorError as error:
            problem = error.os_error.strerror or "no connection"
        except (aiohttp.ClientError, OSError) as error:
            problem = f"no HTTP answer ({type(error).__name__})"
        return Poll(None, problem)

    async def _fetch(self, address: str) -> bytes:
        """The body of the answer. Raises ValueError for one that is none of a sidecar, and what aiohttp raises."""
        assert self._session is not None
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}{naming.STATUS_PATH}"
        # No redirects: a pod could point the operator at addresses that only the operator reaches.
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}")
            body = b""
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
            return body
