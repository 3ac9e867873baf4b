"""Seeds, generator states in JSON, and draws that can be made again from their outcomes."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagelplane.engine.rng import (
    Draws,
    LiveDraws,
    ReplayedDraws,
    StreamRandom,
    each_outcome,
    follows,
    mark_from_json,
    mark_to_json,
    stream_seed,
)
from bagelplane.errors import SnapshotError

SEEDS = st.integers(0, 2**32 - 1)


def seed_of(**changes: Any) -> int:
    place = {"global_seed": 0, "data_seed": 0, "world_size": 1, "rank": 0, "num_workers": 1, "worker_id": 0}
    return stream_seed(**{**place, **changes})


def test_the_first_truthy_seed_is_the_base() -> None:
    assert seed_of(global_seed=7, data_seed=9) == 7
    assert seed_of(global_seed=0, data_seed=9) == 9
    assert seed_of(global_seed=None, data_seed=9) == 9
    assert seed_of(global_seed=None, data_seed=None) == 0


def test_every_worker_of_every_rank_has_a_seed_of_its_own() -> None:
    places = [(rank, worker) for rank in range(4) for worker in range(3)]
    seeds = {
        seed_of(global_seed=5, world_size=4, rank=rank, num_workers=3, worker_id=worker)
        for rank, worker in places
    }
    assert seeds == {(5 * 4 + rank) * 3 + worker for rank, worker in places}


def test_a_world_or_worker_count_of_zero_counts_as_one() -> None:
    assert seed_of(global_seed=5, world_size=0, num_workers=0) == 5


@given(st.integers(0, 2**63), st.integers(1, 4096), st.integers(0, 64))
def test_a_seed_has_32_bits(base: int, world_size: int, num_workers: int) -> None:
    seed = seed_of(global_seed=base, world_size=world_size, rank=world_size - 1, num_workers=num_workers)
    assert 0 <= seed < 2**32
    StreamRandom(seed)


@given(SEEDS)
def test_the_generators_are_those_of_a_seeded_process(seed: int) -> None:
    rng = StreamRandom(seed)
    expected_python, expected_numpy = random.Random(seed), np.random.RandomState(seed)
    assert [rng.python.random() for _ in range(3)] == [expected_python.random() for _ in range(3)]
    assert [rng.numpy.randn() for _ in range(3)] == [expected_numpy.randn() for _ in range(3)]


def draws_of(rng: StreamRandom) -> list[Any]:
    return [
        rng.python.random(), rng.python.choice(range(7)), rng.python.gauss(0, 1), rng.numpy.randn(),
        rng.numpy.randint(3, 9), rng.numpy.permutation(5).tolist(), rng.python.random(), rng.numpy.randn(),
    ]  # fmt: skip


@given(SEEDS, st.lists(st.sampled_from(["python", "gauss", "randn", "randint"]), max_size=9))
def test_a_position_survives_json_in_the_middle_of_anything(seed: int, made: list[str]) -> None:
    """Also between the two normal numbers that are made at once."""
    rng = StreamRandom(seed)
    for kind in made:
        {
            "python": rng.python.random,
            "gauss": lambda: rng.python.gauss(0, 1),
            "randn": rng.numpy.randn,
            "randint": lambda: rng.numpy.randint(10),
        }[kind]()
    state = json.loads(json.dumps(mark_to_json(rng.mark())))
    assert mark_to_json(mark_from_json(state)) == state
    other = StreamRandom(0)
    other.restore(mark_from_json(state))
    assert draws_of(other) == draws_of(rng)


def test_a_position_in_json_is_about_seven_kilobytes() -> None:
    assert len(json.dumps(mark_to_json(StreamRandom(1).mark()))) < 7_000


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("python"),
        lambda state: state["numpy"].pop("index"),
        lambda state: state["python"].update(words="short"),
        lambda state: state["numpy"].update(words=state["numpy"]["words"][:-8]),
        lambda state: state["numpy"].update(words="?" * 3328),
        lambda state: state["python"].update(index="many"),
        lambda state: state.update(numpy=None),
    ],
)
def test_a_damaged_position_is_refused(damage: Any) -> None:
    state = json.loads(json.dumps(mark_to_json(StreamRandom(1).mark())))
    damage(state)
    with pytest.raises(SnapshotError, match="generators"):
        mark_from_json(state)


def all_draws(draws: Any) -> list[Any]:
    return [draws.choice(5), draws.chance(0.5), draws.integer(8, 13), draws.subset(14, 6), draws.choice(1)]


@given(SEEDS)
def test_replayed_draws_give_the_same_and_touch_no_generator(seed: int) -> None:
    live = LiveDraws(StreamRandom(seed))
    made = all_draws(live)
    outcomes = json.loads(json.dumps(live.outcomes))
    assert all_draws(ReplayedDraws(outcomes)) == made


@given(SEEDS)
def test_live_draws_consume_what_the_peers_calls_consume(seed: int) -> None:
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    expected = [
        python.choice(list("abcde")), python.random() < 0.5, int(numpy.randint(8, 13)),
        sorted(numpy.permutation(14)[:6].tolist()), python.choice(["only"]),
    ]  # fmt: skip
    rng = StreamRandom(seed)
    made = all_draws(LiveDraws(rng))
    assert ["abcde"[made[0]], *made[1:4]] == expected[:4]
    assert rng.python.getstate() == python.getstate(), "a choice of one draws too"


def test_a_choice_from_nothing_draws_nothing() -> None:
    rng = StreamRandom(3)
    before = rng.mark()[0]
    for count in (0, -1):
        with pytest.raises(IndexError):
            LiveDraws(rng).choice(count)
        with pytest.raises(IndexError):
            ReplayedDraws([4]).choice(count)
    assert rng.mark()[0] == before


def test_a_replay_that_needs_more_than_was_drawn_says_so() -> None:
    with pytest.raises(SnapshotError, match="more draws"):
        all_draws(ReplayedDraws([1, True]))


def asked(draws: Draws) -> list[Any]:
    """What a row may ask, depending on what it got."""
    count = draws.integer(2, 4)
    asked: list[Any] = [count]
    if draws.chance(0.5):
        return [*asked, "subset", *draws.subset(4, count)]
    return [*asked, *(draws.choice(count) for _ in range(2))]


def test_every_outcome_is_given_once() -> None:
    found = [(asked(draws), draws.outcomes) for draws in each_outcome()]
    assert len(found) == (math.comb(4, 2) + 2 * 2) + (math.comb(4, 3) + 3 * 3)
    assert len({str(answer) for answer, _ in found}) == len(found)
    for answer, outcomes in found:
        assert asked(ReplayedDraws(list(outcomes))) == answer, "and a state's replay gives it again"


def test_what_a_stream_draws_is_among_the_outcomes() -> None:
    everything = [asked(draws) for draws in each_outcome()]
    rng = StreamRandom(5)
    assert all(asked(LiveDraws(rng)) in everything for _ in range(200))


def test_a_row_that_draws_nothing_has_one_outcome() -> None:
    assert [draws.outcomes for draws in each_outcome()] == [[]]


def words_of(rng: StreamRandom) -> list[np.ndarray]:
    python, numpy = rng.mark()
    return [np.array(python[1][:-1], dtype=np.uint32), numpy[1]]


@pytest.mark.parametrize("draws", [0, 1, 311, 312, 313, 5000])
def test_a_generator_follows_from_its_own_seed_alone(draws: int) -> None:
    rng = StreamRandom(4396)
    for _ in range(draws):
        rng.python.random()
        rng.numpy.random_sample()
    for own, other, now in zip(
        words_of(StreamRandom(4396)), words_of(StreamRandom(4397)), words_of(rng), strict=True
    ):
        assert follows(own, now, limit_blocks=1000)
        assert not follows(other, now, limit_blocks=1000)
