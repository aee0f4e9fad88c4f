"""When to start again and when to stop trying."""

import pytest

from megatron_ntp.supervisor.guards import (
    Ledger,
    Limits,
    ended_on_purpose,
    failed,
    judge,
)

LIMITS = Limits(backoff_s=10, max_backoff_s=35)


def test_two_attempts_without_progress_end_the_job() -> None:
    first = failed(Ledger(), -1, -1, 0)
    assert judge(first, LIMITS, 1).again
    second = failed(first, -1, -1, 1)
    verdict = judge(second, LIMITS, 1)
    assert not verdict.again and verdict.status == 93
    assert "2 attempts in a row" in verdict.reason and "checkpoint none" in verdict.reason


@pytest.mark.parametrize(("checkpoint", "step"), [(6, 8), (5, 9), (6, -1)])
def test_a_checkpoint_or_a_further_step_is_progress(checkpoint: int, step: int) -> None:
    ledger = failed(Ledger(5, 8, fruitless=1), checkpoint, step, 0)
    assert ledger.fruitless == 0
    assert (ledger.checkpoint, ledger.step) == (max(5, checkpoint), max(8, step))


@pytest.mark.parametrize(("checkpoint", "step"), [(5, 8), (5, 7), (4, 8), (-1, -1)])
def test_the_same_steps_once_more_are_none(checkpoint: int, step: int) -> None:
    assert failed(Ledger(5, 8, fruitless=1), checkpoint, step, 0).fruitless == 2


def test_a_rank_may_forbid_restarts() -> None:
    verdict = judge(failed(Ledger(), 10, 10, 0), LIMITS, 93)
    assert not verdict.again and verdict.status == 93 and "would not help" in verdict.reason


def test_the_budget_of_an_hour() -> None:
    limits = Limits(max_restarts_per_hour=3)
    ledger = Ledger()
    for step in range(3):
        ledger = failed(ledger, step, step, 1000.0 + step)
        assert judge(ledger, limits, 137).again
    fourth = failed(ledger, 3, 3, 1003.0)
    verdict = judge(fourth, limits, 137)
    assert not verdict.again and verdict.status == 137 and "within an hour" in verdict.reason
    later = failed(ledger, 3, 3, 1000.0 + 3600.5)
    assert judge(later, limits, 137).again, "the first failure is an hour ago"


def test_backoff_doubles_and_is_bounded() -> None:
    limits = Limits(max_fruitless=10, backoff_s=10, max_backoff_s=35)
    waits, ledger = [], failed(Ledger(), 1, 1, 0)
    for second in range(1, 6):
        waits.append(judge(ledger, limits, 1).wait_s)
        ledger = failed(ledger, 1, 1, second)
    assert waits == [0, 10, 20, 35, 35], "none at all after progress"


def test_attempts_ended_on_purpose_do_not_count() -> None:
    ledger = ended_on_purpose(Ledger(5, 8, 1, (1.0,)), 7, 7)
    assert ledger == Ledger(7, 8, 1, (1.0,))
