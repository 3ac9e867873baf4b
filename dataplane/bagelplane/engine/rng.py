"""The two generators of a logical stream, and draws that can be replayed.

A stream draws from one `random.Random` and one legacy NumPy `RandomState`, seeded alike. They are private, so
user code that seeds or uses the global generators changes nothing here.
"""

from __future__ import annotations

import base64
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from bagelplane.errors import SnapshotError

Outcome = TypeVar("Outcome")

_MT_WORDS = 624  # state words of a Mersenne twister, both in Python and in NumPy


def stream_seed(
    *,
    global_seed: int | None,
    data_seed: int | None,
    world_size: int,
    rank: int,
    num_workers: int,
    worker_id: int,
) -> int:
    """The 32-bit seed of one logical stream (STREAM, Randomness): the first truthy seed, spread by position."""
    base = global_seed or data_seed or 0
    return ((base * max(1, world_size) + rank) * max(1, num_workers) + worker_id) & 0xFFFFFFFF


class StreamRandom:
    """One logical stream's generators. Owned by one thread."""

    __slots__ = ("numpy", "python")

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.RandomState(seed)

    def mark(self) -> tuple[Any, Any]:
        """The present position, to go back to with `restore`."""
        return self.python.getstate(), self.numpy.get_state(legacy=True)

    def restore(self, mark: tuple[Any, Any]) -> None:
        self.python.setstate(mark[0])
        self.numpy.set_state(mark[1])


def mark_to_json(mark: tuple[Any, Any]) -> dict[str, Any]:
    """A mark in JSON types: the words of both twisters as base64 of little-endian uint32, about 7 KB in all."""
    (version, internal, gauss_next), (_, keys, position, has_gauss, cached) = mark
    return {
        "python": {
            "version": version,
            "words": _encode_words(internal[:_MT_WORDS]),
            "index": internal[_MT_WORDS],
            "gauss": gauss_next,
        },
        "numpy": {
            "words": _encode_words(keys),
            "index": int(position),
            "gauss": float(cached) if has_gauss else None,
        },
    }


def mark_from_json(state: dict[str, Any]) -> tuple[Any, Any]:
    """The inverse of `mark_to_json`. Raises SnapshotError for anything that it did not write."""
    try:
        python, numpy = state["python"], state["numpy"]
        words = tuple(int(word) for word in _decode_words(python["words"]))
        gauss = numpy["gauss"]
        return (
            (int(python["version"]), (*words, int(python["index"])), python["gauss"]),
            (
                "MT19937",
                _decode_words(numpy["words"]),
                int(numpy["index"]),
                int(gauss is not None),
                gauss or 0.0,
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(
            "the generators' part of a state cannot be read",
            got=f"{type(error).__name__}: {error}",
            fix="resume from another snapshot",
        ) from error


def _encode_words(words: Sequence[int] | np.ndarray) -> str:
    return base64.b64encode(np.asarray(words, dtype="<u4").tobytes()).decode("ascii")


def _decode_words(text: str) -> np.ndarray:
    words = np.frombuffer(base64.b64decode(text, validate=True), dtype="<u4")
    if len(words) != _MT_WORDS:
        raise ValueError(f"{len(words)} generator words instead of {_MT_WORDS}")
    return words.astype(np.uint32)


class _Uniform(Protocol):
    def random(self) -> float: ...


class _Normal(Protocol):
    def randn(self) -> float: ...


class PackDraws(Protocol):
    """What putting a sample into a pack draws from: a StreamRandom, or the global generators."""

    @property
    def python(self) -> _Uniform: ...

    @property
    def numpy(self) -> _Normal: ...


class Draws(Protocol):
    """The draws that planning one row makes. `outcomes` holds what they gave, for a later replay."""

    outcomes: list[Any]

    def choice(self, count: int) -> int:
        """An index below `count`; IndexError, without a draw, when there is nothing to choose from."""
        ...

    def chance(self, probability: float) -> bool: ...

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, high excluded, of the NumPy generator."""
        ...

    def subset(self, count: int, size: int) -> list[int]:
        """`size` sorted indexes below `count`, of the NumPy generator."""
        ...


class LiveDraws:
    """Draws from a stream's generators, remembering each outcome."""

    __slots__ = ("_rng", "outcomes")

    def __init__(self, rng: StreamRandom) -> None:
        self._rng = rng
        self.outcomes: list[Any] = []

    def choice(self, count: int) -> int:
        # `choice` on a range consumes what the peer's choice on a list of that length does.
        return self._remember(self._rng.python.choice(range(count)))

    def chance(self, probability: float) -> bool:
        return self._remember(self._rng.python.random() < probability)

    def integer(self, low: int, high: int) -> int:
        return self._remember(int(self._rng.numpy.randint(low, high)))

    def subset(self, count: int, size: int) -> list[int]:
        return self._remember(sorted(self._rng.numpy.permutation(count)[:size].tolist()))

    def _remember(self, outcome: Outcome) -> Outcome:
        self.outcomes.append(outcome)
        return outcome


class ReplayedDraws:
    """Gives the outcomes of an earlier `LiveDraws` again; the generators are not touched."""

    __slots__ = ("_next", "outcomes")

    def __init__(self, outcomes: list[Any]) -> None:
        self.outcomes = outcomes
        self._next = iter(outcomes)

    def choice(self, count: int) -> int:
        if count <= 0:
            raise IndexError("nothing to choose from")
        return int(self._take())

    def chance(self, probability: float) -> bool:
        return bool(self._take())

    def integer(self, low: int, high: int) -> int:
        return int(self._take())

    def subset(self, count: int, size: int) -> list[int]:
        return [int(index) for index in self._take()]

    def _take(self) -> Any:
        try:
            return next(self._next)
        except StopIteration:
            raise SnapshotError(
                "a buffered sample's row needs more draws than its state recorded",
                fix="the data or the code has changed since; resume from a snapshot of the present data",
            ) from None


def each_outcome() -> Iterator[Draws]:
    """Draws that give, one after the other, every combination of outcomes that a row can ask for.

    Each is to be used for the row before the next is taken: what a row asks depends on what it got.
    """
    taken: list[int] = []
    while True:
        draws = _ListedDraws(taken)
        yield draws
        taken = [*draws.taken]
        while taken and taken[-1] + 1 >= draws.options[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1


class _ListedDraws:
    """Gives the outcomes of these numbers among all that there are, then the first of each."""

    def __init__(self, begin: Sequence[int]) -> None:
        self._begin = begin
        self.outcomes: list[Any] = []
        self.taken: list[int] = []
        self.options: list[int] = []

    def choice(self, count: int) -> int:
        if count <= 0:
            raise IndexError("nothing to choose from")
        return self._give(count, int)

    def chance(self, probability: float) -> bool:
        return self._give(2, bool)

    def integer(self, low: int, high: int) -> int:
        return self._give(high - low, lambda number: low + number)

    def subset(self, count: int, size: int) -> list[int]:
        chosen = itertools.combinations(range(count), size)
        return self._give(
            math.comb(count, size), lambda number: list(next(itertools.islice(chosen, number, None)))
        )

    def _give(self, options: int, outcome: Callable[[int], Outcome]) -> Outcome:
        place = len(self.taken)
        number = self._begin[place] if place < len(self._begin) else 0
        self.taken.append(number)
        self.options.append(options)
        self.outcomes.append(outcome(number))
        given: Outcome = self.outcomes[-1]
        return given


def follows(begin: Sequence[int] | np.ndarray, words: np.ndarray, limit_blocks: int) -> bool:
    """Whether a twister that was seeded to the words `begin` comes to the words `words`.

    (A Mersenne twister makes its numbers in blocks of 624, and its state is the last block before it is tempered.)
    """
    if np.array_equal(begin, words):
        return True
    twister = np.random.MT19937()
    key = np.asarray(begin, dtype=np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": _MT_WORDS}}
    wanted, at_once = _tempered(np.asarray(words, dtype=np.uint32)), 1000
    for _ in range(-(-limit_blocks // at_once)):
        blocks = twister.random_raw(at_once * _MT_WORDS).astype(np.uint32).reshape(at_once, _MT_WORDS)
        if np.any(np.all(blocks == wanted, axis=1)):
            return True
    return False


def _tempered(words: np.ndarray) -> np.ndarray:
    mixed = words ^ (words >> 11)
    mixed ^= (mixed << 7) & np.uint32(0x9D2C5680)
    mixed ^= (mixed << 15) & np.uint32(0xEFC60000)
    tempered: np.ndarray = mixed ^ (mixed >> 18)
    return tempered
