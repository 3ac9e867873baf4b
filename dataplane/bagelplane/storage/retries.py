"""Tries again what fails in a way that passes, and stops early at what will not."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bagelplane.storage.faults import Fault, Retry

_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

_BRIEF_ATTEMPTS = 3
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """attempts: most tries. seconds: no new try begins later than this after the first."""

    attempts: int = 6
    seconds: float = 60.0

    def run(
        self,
        action: Callable[[int], _Result],
        classify: Callable[[Exception], Fault],
        reconnect: Callable[[], bool],
        on_retry: Callable[[Fault], None] = lambda fault: None,
        outlasts: Callable[[Fault], bool] = lambda fault: False,
    ) -> _Result:
        """The result of `action(number of the try, from 0)`. Raises the error of the last fault.

        What passes is still tried every few seconds, when all tries are used up, for as long as `outlasts` says so.

        `reconnect` drops connection and credentials and says whether new ones may be found; once a call at
        most.
        """
        began = time.monotonic()
        attempt, has_reconnected = 0, False
        while True:
            try:
                return action(attempt)
            except Exception as error:  # noqa: BLE001 (libraries raise dozens of kinds; none may get out)
                fault = classify(error)
                _logger.debug("try %d failed: %s", attempt, type(error).__name__)
            attempt += 1
            if fault.retry is Retry.RECONNECT and not has_reconnected and reconnect():
                has_reconnected = True
                on_retry(fault)
                continue
            pause_seconds = self._pause(fault, attempt, time.monotonic() - began)
            if pause_seconds is None and fault.retry in (Retry.BACKOFF, Retry.BRIEF) and outlasts(fault):
                pause_seconds = _LONGEST_PAUSE_SECONDS * random.uniform(0.5, 1.0)
            if pause_seconds is None:
                raise fault.error from None
            _logger.warning("trying again in %.1f s: %s", pause_seconds, fault.error)
            on_retry(fault)
            time.sleep(pause_seconds)

    def _pause(self, fault: Fault, attempt: int, elapsed_seconds: float) -> float | None:
        limit = {Retry.BACKOFF: self.attempts, Retry.BRIEF: min(_BRIEF_ATTEMPTS, self.attempts)}.get(
            fault.retry, 0
        )
        if attempt >= limit:
            return None
        longest = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**attempt)
        # Spread, so that ranks which failed together do not come back together.
        pause_seconds = longest * random.uniform(0.5, 1.0)
        return pause_seconds if elapsed_seconds + pause_seconds <= self.seconds else None
