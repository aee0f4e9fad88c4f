"""Hangs: deadlines by phase, what is learned from steps, and who is named."""

import pytest

from megatron_ntp.beats import FIRST_STEP, Beat
from megatron_ntp.supervisor.stall import Deadlines, Sign, Stall, StepTimes, find_stall

DEADLINES = Deadlines(
    start_s=100, load_s=200, first_step_s=300, save_s=400, eval_s=500, step_min_s=10, step_factor=5
)


def look(*signs: Sign, world_size: int | None = None, longest_s: float = 0.0) -> Stall | None:
    by_rank = {sign.rank: sign for sign in signs}
    size = len(signs) if world_size is None else world_size
    return find_stall(by_rank, size, 1000.0, DEADLINES, longest_s)


def train(rank: int, step: int, age_s: float, state: str = "S") -> Sign:
    return Sign(rank, "train", step, age_s, stepped=True, state=state)


def test_a_step_within_its_deadline() -> None:
    assert look(train(0, 5, 9.9), train(1, 5, 9.9)) is None
    stall = look(train(0, 5, 11), train(1, 5, 12))
    assert stall is not None and stall.silent_s == 11 and stall.deadline_s == 10


def test_the_deadline_is_learned() -> None:
    assert look(train(0, 5, 49), longest_s=10) is None
    stall = look(train(0, 5, 51), longest_s=10)
    assert stall is not None and stall.deadline_s == 50
    fixed = Deadlines(step_s=3)
    assert find_stall({0: train(0, 5, 4)}, 1, 9, fixed, 100) is not None


def test_who_moves_excuses_the_others() -> None:
    assert look(train(0, 5, 99), train(1, 5, 1)) is None


@pytest.mark.parametrize(
    ("phase", "deadline_s"),
    [("start", 100), ("load", 200), ("save", 400), ("eval", 500), ("done", 100)],
)
def test_phases_have_deadlines_of_their_own(phase: str, deadline_s: float) -> None:
    """A rank that saves keeps the others from their step."""
    waiting = train(1, 5, deadline_s + 50)
    assert look(Sign(0, phase, 5, deadline_s - 1), waiting) is None
    stall = look(Sign(0, phase, 5, deadline_s + 1), waiting)
    assert stall is not None and stall.deadline_s == deadline_s


def test_the_first_step_may_take_longer() -> None:
    first = Sign(0, "train", 5, 299, stepped=False)
    assert look(first) is None
    assert look(Sign(0, "train", 5, 301, stepped=False)) is not None


def test_ranks_without_a_sign_are_starting() -> None:
    stall = look(Sign(0, "load", -1, 500), world_size=3)
    assert stall is not None and stall.ranks == (1, 2) and "in start" in stall.reason


def test_a_loop_of_another_library_is_not_judged() -> None:
    """Nobody sees its steps. Before it begins, and in what it calls of Megatron, it is."""
    assert look(Sign(0, "other", -1, 1e6), Sign(1, "other", -1, 1e6)) is None
    assert look(Sign(0, "start", -1, 101), Sign(1, "start", -1, 101)) is not None
    assert look(Sign(0, "save", -1, 401), Sign(1, "save", -1, 401)) is not None


def test_the_ranks_furthest_behind_are_named() -> None:
    stall = look(train(0, 7, 50), train(1, 6, 50), train(2, 7, 50))
    assert stall is not None and stall.ranks == (1,)
    assert "rank 1, in train after step 6" in stall.reason


def test_a_stopped_process_is_named_first() -> None:
    stall = look(train(0, 6, 50), train(1, 7, 50, "T"), train(2, 7, 50))
    assert stall is not None and stall.ranks == (1,) and "stopped by a signal" in stall.reason


def test_times_of_steps() -> None:
    times = StepTimes()
    marks = {"train": 1.0, FIRST_STEP: 2.0}

    def beat(step: int, since: float, phase: str = "train") -> Beat:
        return Beat(0, phase, step, since, marks)

    times.see(Beat(0, "train", 3, 5.0, {"train": 1.0}))
    times.see(beat(4, 100.0))
    assert times.longest_s == 0.0, "the first step is not one of the others"
    times.see(beat(5, 101.5))
    times.see(beat(5, 101.5))
    times.see(beat(5, 109.0, "save"))
    times.see(beat(5, 119.0))
    times.see(beat(9, 123.0))
    assert times.longest_s == 1.5, "saves and evaluations are no steps"
    for step in range(10, 300):
        times.see(beat(step, 105.5 + step))
    assert times.longest_s == 1.0, "only the last steps count"
