"""Plan packs of one logical stream: which samples, in which order, until a budget is met (STREAM, Packing).

The planner owns the stream's generators, the buffer and the groups' positions. `mark` and `restore` move it
between packs in memory; `state_to_json` and `state_from_json` carry a mark across processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bagelplane.engine.drops import Drop, DropReason
from bagelplane.engine.packer import OpenPack, PackingConfig
from bagelplane.engine.profile import Profile
from bagelplane.engine.raw_samples import sample_from_json, sample_to_json
from bagelplane.engine.rng import StreamRandom, mark_from_json, mark_to_json
from bagelplane.engine.rows import RowPlace
from bagelplane.engine.samples import EncodedImage, ImageLedger, RowDropped, Sample
from bagelplane.errors import DataError, SnapshotError

STATE_VERSION = 1


class Group(Protocol):
    """An endless run of one group's rows for one logical worker."""

    name: str
    mandatory: bool
    weight: float

    def draw(self, rng: StreamRandom) -> Sample:
        """The next row's sample. Raises RowDropped for a row that is not trained on; the next call goes on."""
        ...

    def mark(self) -> Any:
        """The present position, JSON-able and immutable."""
        ...

    def restore(self, mark: Any) -> None: ...

    def from_reference(self, reference: Any) -> Sample:
        """A sample again from its `reference`, without touching the generators."""
        ...


@dataclass(frozen=True, slots=True)
class Mark:
    """All that determines the packs to come."""

    rng: tuple[Any, Any]
    buffer: tuple[Sample, ...]
    groups: tuple[Any, ...]
    packs: int
    carried: Sample | None = None
    """What did not fit while the buffer was full: it opens the next pack (profile Strict)."""


@dataclass(frozen=True, slots=True)
class PackPlan:
    """One pack as decided. `opened` are the images whose pixels the decision rests on, by key."""

    pack: OpenPack
    drops: list[Drop]
    opened: Mapping[str, EncodedImage]
    before: Mark
    after: Mark


class PackPlanner:
    """Plans one logical stream's packs one after the other. Not thread-safe."""

    def __init__(
        self,
        *,
        config: PackingConfig,
        groups: Sequence[Group],
        rng: StreamRandom,
        images: ImageLedger,
        profile: Profile,
        max_consecutive_drops: int,
    ) -> None:
        self.config, self._groups, self._rng = config, list(groups), rng
        self._images, self.profile = images, profile
        self.max_consecutive_drops = max_consecutive_drops
        self._buffer: list[Sample] = []
        self._carried: Sample | None = None
        self._packs = 0
        self._drops: list[Drop] = []
        self._in_a_row: Counter[str] = Counter()
        self._cumulative = cumulative_weights([group.weight for group in groups])

    def mark(self) -> Mark:
        groups = tuple(group.mark() for group in self._groups)
        return Mark(self._rng.mark(), tuple(self._buffer), groups, self._packs, self._carried)

    def restore(self, mark: Mark) -> None:
        self._rng.restore(mark.rng)
        self._buffer, self._carried = list(mark.buffer), mark.carried
        self._packs = mark.packs
        for group, position in zip(self._groups, mark.groups, strict=True):
            group.restore(position)

    def plan(self) -> PackPlan:
        """The next pack. Raises DataError when a group gives nothing but drops."""
        before = self.mark()
        self._drops = []
        self._images.take_opened()
        pack = OpenPack()
        try:
            while not self._fill(pack):
                pass
        except BaseException:
            self.restore(before)
            raise
        self._packs += 1
        return PackPlan(pack, self._drops, self._images.take_opened(), before, self.mark())

    def _fill(self, pack: OpenPack) -> bool:
        """One round of the packing loop; True when the pack is to be yielded."""
        config = self.config
        if pack.length == 0 and not self._begin(pack):
            return True
        buffered = pack.length < config.prefer_buffer_before and bool(self._buffer)
        sample = self._buffer.pop(0) if buffered else self._draw(self._choose_group())
        if not self.profile.fits_sample_budget(sample.size, config.max_tokens_per_sample, mandatory=False):
            message = _overlength_message(sample, config)
            self._drop(self.name_of(sample), DropReason.OVERLENGTH_SAMPLE, message, sample.place)
            return False
        if pack.length + sample.size > config.max_tokens:
            return not self._set_aside(sample, pack, buffered=buffered)
        self._put(pack, sample)
        return pack.length >= config.expected_tokens

    def _begin(self, pack: OpenPack) -> bool:
        """Open a pack: what the last one had no place for, then a sample of each mandatory group.

        False when the pack has to be yielded as it is: a mandatory sample found no place, not even in the buffer.
        """
        if self._carried is not None:
            sample, self._carried = self._carried, None
            self._put(pack, sample)
        present = {placed.sample.group_index for placed in pack.placed}
        for index, group in enumerate(self._groups):
            if not group.mandatory or (self.profile.keeps_what_does_not_fit and index in present):
                continue
            sample = self._draw_mandatory(index)
            fits = pack.length + sample.size <= self.config.max_tokens
            if fits or self.profile.mandatory_may_overflow:
                self._put(pack, sample)
            elif not self._set_aside(sample, pack, buffered=False):
                return False
        return True

    def _draw_mandatory(self, index: int) -> Sample:
        config, group = self.config, self._groups[index]
        while True:
            sample = self._draw(index)
            if self.profile.fits_sample_budget(sample.size, config.max_tokens_per_sample, mandatory=True):
                return sample
            reason = DropReason.OVERLENGTH_MANDATORY_SAMPLE
            self._drop(group.name, reason, _overlength_message(sample, config), sample.place)

    def _put(self, pack: OpenPack, sample: Sample) -> None:
        pack.put(sample, self.config, self._rng)
        self._in_a_row[self.name_of(sample)] = 0

    def _set_aside(self, sample: Sample, pack: OpenPack, *, buffered: bool) -> bool:
        """What becomes of a sample that does not fit. False when the pack has to be yielded for it."""
        if not buffered and len(self._buffer) < self.config.max_buffer_size:
            self._buffer.append(sample)
            self._in_a_row[self.name_of(sample)] = 0
            return True
        if pack.length == 0:
            # Yielding an empty pack again and again would be the end of it.
            raise DataError(
                f"a sample of group {self.name_of(sample)} fits into no pack",
                got=f"{sample.size} tokens",
                expected=f"at most {self.config.max_tokens}, the budget of a whole pack",
                fix="let maxTokensPerSample be at most maxTokens",
            )
        if self.profile.keeps_what_does_not_fit:
            self._carried = sample
            self._top_up(pack)
            return False
        source = (
            "came from the buffer" if buffered else f"the buffer of {self.config.max_buffer_size} is full"
        )
        message = f"{sample.data_indexes}: {sample.size} tokens do not fit behind {pack.length}, and {source}"
        self._drops.append(Drop(self.name_of(sample), DropReason.BUFFER_FULL, message, sample.place))
        return False

    def _top_up(self, pack: OpenPack) -> None:
        """Put in what fits of the buffer, oldest first: nothing is lost, so what is large has to go somewhere."""
        waiting, self._buffer = self._buffer, []
        for sample in waiting:
            is_short = pack.length < self.config.expected_tokens
            if is_short and pack.length + sample.size <= self.config.max_tokens:
                self._put(pack, sample)
            else:
                self._buffer.append(sample)

    def name_of(self, sample: Sample) -> str:
        """The group's name; a sample carries its type, which packs report."""
        return self._groups[sample.group_index].name

    def _choose_group(self) -> int:
        draw = self._rng.python.random()
        for index, bound in enumerate(self._cumulative):
            if draw < bound:
                return index
        return 0

    def _draw(self, index: int) -> Sample:
        group = self._groups[index]
        while True:
            try:
                sample = group.draw(self._rng)
            except RowDropped as dropped:
                self._drop(group.name, dropped.reason, dropped.message, dropped.place)
                continue
            sample.group_index = index
            return sample

    def _drop(self, group: str, reason: str, message: str, place: RowPlace | None) -> None:
        self._drops.append(Drop(group, reason, message, place))
        self._in_a_row[group] += 1
        if self._in_a_row[group] >= self.max_consecutive_drops:
            raise DataError(
                f"group {group} gives no sample that can be packed",
                got=f"{self._in_a_row[group]} rows in a row dropped, the last as {reason}: {message}",
                expected=f"a usable row within {self.max_consecutive_drops} (drops.maxConsecutive)",
                fix="mend the data of this group, its budgets, or raise drops.maxConsecutive",
            )

    def state_to_json(self, mark: Mark) -> dict[str, Any]:
        """`mark` in JSON types: generators, positions, and references instead of buffered samples."""
        carried = {} if mark.carried is None else {"carried": _to_reference(mark.carried)}
        return {
            "version": STATE_VERSION,
            "packs": mark.packs,
            "rng": mark_to_json(mark.rng),
            "buffer": [_to_reference(sample) for sample in mark.buffer],
            **carried,
            "groups": [
                {"name": group.name, "position": position}
                for group, position in zip(self._groups, mark.groups, strict=True)
            ],
        }

    def state_from_json(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises SnapshotError naming what does not fit."""
        names = [group.name for group in self._groups]
        try:
            if state["version"] != STATE_VERSION:
                raise SnapshotError(
                    "a state of another format",
                    got=f"version {state['version']}",
                    expected=f"version {STATE_VERSION}",
                    fix="use the release that wrote it",
                )
            found = [group["name"] for group in state["groups"]]
            if found != names:
                raise SnapshotError(
                    "a state of other groups",
                    got=", ".join(found),
                    expected=", ".join(names),
                    fix="use its own resource",
                )
            positions = tuple(group["position"] for group in state["groups"])
            buffer = tuple(self._from_reference(entry) for entry in state["buffer"])
            carried = self._from_reference(state["carried"]) if "carried" in state else None
            mark = Mark(mark_from_json(state["rng"]), buffer, positions, int(state["packs"]), carried)
            self.restore(mark)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise SnapshotError(
                "a state that cannot be read",
                got=f"{type(error).__name__}: {error}",
                fix="resume from another snapshot",
            ) from error

    def _from_reference(self, entry: Mapping[str, Any]) -> Sample:
        index = int(entry["group"])
        if "sample" in entry:
            sample = sample_from_json(entry["sample"])
        else:
            sample = self._groups[index].from_reference(entry["row"])
        sample.group_index = index
        return sample


def _to_reference(sample: Sample) -> dict[str, Any]:
    kept = {"sample": sample_to_json(sample)} if sample.reference is None else {"row": sample.reference}
    return {"group": sample.group_index, **kept}


def cumulative_weights(weights: Sequence[float]) -> list[float]:
    """`cum[i] = sum(w[:i + 1]) / total`, in this very order of operations."""
    total = sum(weights)
    return [sum(weights[: index + 1]) / total for index in range(len(weights))]


def _overlength_message(sample: Sample, config: PackingConfig) -> str:
    return f"{sample.data_indexes}: {sample.size} tokens, limit {config.max_tokens_per_sample}"
