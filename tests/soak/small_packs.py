"""The fake stream with whole packs, such as PackedLoader makes batches of: as fast as it goes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from bagelplane.engine.pack import Pack
from tests.integration.fake_sidecar import make_pack
from tests.integration.fake_stream import FakeStream, Topology, source_looks

__all__ = ["Topology", "open_rank_stream", "source_looks"]


class SmallPacks(FakeStream):
    def _build(self, draws: random.Random, state: dict[str, Any]) -> Pack:
        pack, _ = make_pack(self.step % 100)
        return replace(pack, step=self.step, state=state)


open_rank_stream = SmallPacks.open
