"""A rank's stream of small packs, a pure function of rank, world size and step: for tests of all around it.

What it shall do wrong is said in the resource's annotations: `fake/fail-at: "7"` (a DataError at step 7),
`fake/crash-at` (an exception of no kind of ours), `fake/bad-at` (an image found undecodable there),
`fake/pack-seconds: "0.01"`, `fake/skip-seconds`, `fake/refuse: "text"` (what a look at its data says).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from bagelplane.costs import Costs
from bagelplane.engine.pack import Pack
from bagelplane.errors import DataError, SnapshotError
from bagelplane.spec import BagelDataset


@dataclass(frozen=True, slots=True)
class Topology:
    rank: int
    world_size: int
    num_workers: int


class FakeStream:
    def __init__(
        self,
        dataset: BagelDataset,
        topology: Topology,
        state: Mapping[str, Any] | None,
        known_bad: Mapping[str, str],
        on_bad_images: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._orders = dataset.metadata.annotations
        self._topology = topology
        self._known_bad = dict(known_bad)
        self._on_bad_images = on_bad_images
        self.step = 0
        self._sum = 0
        self.costs = Costs()
        if state is not None:
            if state["world_size"] != topology.world_size:
                raise SnapshotError("a state of another topology", got=str(state), expected=str(topology))
            self.step, self._sum = state["step"], state["sum"]

    @classmethod
    def open(
        cls,
        dataset: BagelDataset,
        topology: Topology,
        *,
        state: Mapping[str, Any] | None = None,
        decode_threads: int = 1,
        known_bad: Mapping[str, str] | None = None,
        on_bad_images: Callable[[Mapping[str, str]], None] = lambda _: None,
        producers: int = 1,
        on_wait: Callable[[str], None] | None = None,
    ) -> Self:
        """As `bagelplane.stream.open_rank_stream` is called."""
        return cls(dataset, topology, state, known_bad or {}, on_bad_images)

    def next_pack(self, allocate: Callable[[Pack], Sequence[np.ndarray]]) -> Pack:
        time.sleep(float(self._orders.get("fake/pack-seconds", "0")))
        if self._orders.get("fake/fail-at") == str(self.step):
            raise DataError("group t2i gives nothing but drops", got="1000 drops", fix="look at the data")
        if self._orders.get("fake/crash-at") == str(self.step):
            raise ZeroDivisionError("made to fail")
        bad = self._orders.get("fake/bad-at")
        if bad == str(self.step) and "fake-image" not in self._known_bad:
            allocate(self._build(random.Random(-1), {}))  # the plan that a bad image makes void
            self._known_bad["fake-image"] = "does not decode"
            self._on_bad_images({"fake-image": "does not decode"})
        draws = self._draws(self.step)
        after = self._sum_after(self.step, self._sum)
        pack = self._build(draws, self._state(self.step + 1, after))
        for number, pixels in enumerate(allocate(pack)):
            rng = np.random.default_rng([self._topology.rank, self.step, number])
            pixels[...] = rng.integers(0, 256, pixels.shape, dtype=np.uint8)
            self.costs.decoded(0.001)
        self.costs.requested("read", 0.002)
        self.costs.read(1000)
        self.step, self._sum = self.step + 1, after
        return pack

    def skip_to(self, step: int, *, on_progress: Callable[[int], None] | None = None) -> None:
        while self.step < step:
            time.sleep(float(self._orders.get("fake/skip-seconds", "0")))
            self._sum = self._sum_after(self.step, self._sum)
            self.step += 1
            if on_progress is not None:
                on_progress(self.step)

    def state(self) -> dict[str, Any]:
        return self._state(self.step, self._sum)

    def close(self) -> None:
        pass

    def _draws(self, step: int) -> random.Random:
        return random.Random(f"{self._topology} {step}")

    def _sum_after(self, step: int, total: int) -> int:
        # Depends on every step before: a wrong state shows in every pack after it.
        return (total * 31 + self._draws(step).randrange(1 << 40)) % (1 << 61)

    def _state(self, step: int, total: int) -> dict[str, Any]:
        return {
            "step": step,
            "sum": total,
            "world_size": self._topology.world_size,
            "padding": "x" * 2000,
            "drops": {"t2i": {"t2i_image_parse": step // 3}},
        }

    def _build(self, draws: random.Random, state: dict[str, Any]) -> Pack:
        shapes = [(draws.randrange(1, 40), draws.randrange(1, 40)) for _ in range(draws.randrange(0, 5))]
        length = draws.randrange(1, 300)
        arrays = {
            "packed_text_ids": np.arange(length, dtype=np.int64) + self._sum,
            "ce_loss_weights": np.full(length, 0.25, dtype=np.float32),
        }
        scalars = {"sequence_length": length, "sample_lens": [length], "max_num_tokens": 4096}
        return Pack(self.step, scalars, arrays, shapes, list(range(len(shapes))), [], 14, state)


open_rank_stream = FakeStream.open


def source_looks(
    dataset: BagelDataset, world_size: int, storage: object
) -> Iterator[tuple[str, Callable[[], object]]]:
    def look() -> None:
        refusal = dataset.metadata.annotations.get("fake/refuse")
        if refusal:
            raise DataError(refusal, got="nothing", expected="something", fix="another resource")

    yield "spec.groups[0].datasets[0]", look
