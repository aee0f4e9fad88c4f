"""Shares of microbatches: exact cases, then optimality against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ntp.errors import PlanBatchError
from megatron_ntp.plan.batch import BatchPolicy, microbatch_shares, plan_batch

COSTS = st.lists(
    st.one_of(
        st.just(1.0), st.floats(1, 4, allow_nan=False), st.fractions(1, 4, max_denominator=8)
    ),
    min_size=1,
    max_size=4,
)


def step_time(shares: tuple[int, ...], costs: list[float | Fraction], pp: int) -> Fraction:
    return max((share + pp - 1) * Fraction(cost) for share, cost in zip(shares, costs, strict=True))


def test_keep() -> None:
    batch = plan_batch("keep", 8, (8, 8, 7), 8, (1, 1, 1.25))
    assert batch.shares == (8, 8, 8)
    assert batch.slowdown == 1.25
    assert batch.sample_fraction == 1
    assert batch.relative_throughput == 0.8
    assert batch.total == 24


def test_shrink_never_takes_longer_than_healthy_replicas() -> None:
    batch = plan_batch("shrink", 8, (8, 8, 7), 8, (1, 1, 1.25))
    assert batch.shares == (8, 8, 6)  # 8 / 1.25 = 6.4
    assert batch.slowdown == 1
    assert batch.sample_fraction == 22 / 24
    assert microbatch_shares("shrink", 10, (8, 7), 8, (1, Fraction(10, 9))) == (10, 9)
    assert microbatch_shares("shrink", 10, (8, 7), 8, (1, 1)) == (10, 10)  # power makes up for it


def test_shrink_counts_the_pipeline_fill() -> None:
    assert microbatch_shares("shrink", 8, (8, 7), 8, (1, 1.25), pp=1) == (8, 6)
    assert microbatch_shares("shrink", 8, (8, 7), 8, (1, 1.25), pp=5) == (8, 5)  # 12/1.25 - 4


def test_shrink_without_a_healthy_replica_keeps_pace_with_the_fastest() -> None:
    assert microbatch_shares("shrink", 8, (7, 7, 6), 8, (1.25, 1.25, 2.5)) == (8, 8, 4)


def test_redistribute_keeps_the_global_batch() -> None:
    batch = plan_batch("redistribute", 8, (8, 8, 7), 8, (1, 1, 1.25))
    assert batch.shares == (9, 8, 7)  # ties: the earlier replica gets more
    assert batch.slowdown == 9 / 8
    assert microbatch_shares("redistribute", 8, (8, 8), 8, (1, 1)) == (8, 8)
    assert microbatch_shares("redistribute", 4, (8, 8, 8, 1), 8, (1, 1, 1, 9)) == (5, 5, 5, 1)


def test_redistribute_gives_everyone_at_least_one() -> None:
    assert microbatch_shares("redistribute", 1, (8, 8, 1), 8, (1, 1, 8)) == (1, 1, 1)


@settings(deadline=None)
@given(COSTS, st.integers(1, 4), st.integers(1, 3))
def test_redistribute_is_the_exact_minimum(
    costs: list[float | Fraction], num_microbatches: int, pp: int
) -> None:
    degrees = (4,) * len(costs)
    shares = microbatch_shares("redistribute", num_microbatches, degrees, 4, costs, pp)
    total = num_microbatches * len(costs)
    assert sum(shares) == total
    assert min(shares) >= 1
    every = product(range(1, total + 1), repeat=len(costs) - 1)
    splits = ((*head, total - sum(head)) for head in every if sum(head) < total)
    assert step_time(shares, costs, pp) == min(step_time(s, costs, pp) for s in splits)


@given(COSTS, st.integers(1, 5000), st.integers(1, 16))
def test_redistribute_equals_handing_out_one_by_one(
    costs: list[float | Fraction], num_microbatches: int, pp: int
) -> None:
    """The start that skips hand-outs must not change the shares."""
    degrees, total = (4,) * len(costs), min(num_microbatches, 60) * len(costs)
    shares = [1] * len(costs)
    for _ in range(total - len(costs)):
        ends = [(s + pp) * Fraction(cost) for s, cost in zip(shares, costs, strict=True)]
        shares[ends.index(min(ends))] += 1
    assert microbatch_shares(
        "redistribute", min(num_microbatches, 60), degrees, 4, costs, pp
    ) == tuple(shares)
    large = microbatch_shares("redistribute", num_microbatches, degrees, 4, costs, pp)
    assert sum(large) == num_microbatches * len(costs)


@given(COSTS, st.integers(1, 50), st.integers(1, 8))
def test_shrink_is_the_largest_share_that_fits(
    costs: list[float | Fraction], num_microbatches: int, pp: int
) -> None:
    costs = [1, *costs]
    degrees = (4, *(3 for _ in costs[1:]))
    try:
        shares = microbatch_shares("shrink", num_microbatches, degrees, 4, costs, pp)
    except PlanBatchError:
        assert any(pp * Fraction(cost) > num_microbatches + pp - 1 for cost in costs)
        return
    healthy = num_microbatches + pp - 1
    for share, cost in zip(shares, costs, strict=True):
        assert 1 <= share <= num_microbatches
        assert (share + pp - 1) * Fraction(cost) <= healthy
        assert share == num_microbatches or (share + pp) * Fraction(cost) > healthy


def test_many_replicas_are_cheap() -> None:
    costs = [1 + dp_rank / 4096 for dp_rank in range(4096)]
    shares = microbatch_shares("redistribute", 512, (4,) * 4096, 4, costs)
    assert sum(shares) == 512 * 4096


def test_policies_by_name() -> None:
    assert plan_batch(BatchPolicy.KEEP, 1, (2,), 2, (1,)) == plan_batch("keep", 1, (2,), 2, (1,))


# Errors


def test_shrink_with_one_microbatch_says_what_to_do() -> None:
    with pytest.raises(PlanBatchError) as caught:
        microbatch_shares("shrink", 1, (8, 7), 8, (1, 1.25))
    message = str(caught.value)
    assert "policy shrink: DP rank 1 (TP degree 7, 1.250 x the time of a healthy" in message
    assert "Use policy keep, or at least 2 microbatches per replica" in message
    assert microbatch_shares("shrink", 2, (8, 7), 8, (1, 1.25)) == (2, 1)


def test_the_least_number_in_the_message_is_the_least_that_works() -> None:
    with pytest.raises(PlanBatchError, match="at least 4 microbatches"):
        microbatch_shares("shrink", 3, (8, 1), 8, (1, 2.5), pp=2)
    assert microbatch_shares("shrink", 4, (8, 1), 8, (1, 2.5), pp=2) == (4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("shrnk", 8, (8,), 8, (1,)), "unknown batch policy 'shrnk'; policies are keep, shrink"),
        (("keep", 0, (8,), 8, (1,)), "num_microbatches must be at least 1, got 0"),
        (("keep", 8, (8, 7), 8, (1,)), "got 2 degrees and 1 slowness values"),
        (("keep", 8, (), 8, ()), "got 0 degrees"),
        (("keep", 8, (8, 9), 8, (1, 1)), r"DP rank 1: TP degree 9 is outside 1\.\.8"),
        (("keep", 8, (8, 7), 8, (1, 0.9)), "DP rank 1: slowness 0.9 must be a finite number"),
        (("keep", 8, (8,), 8, (float("nan"),)), "DP rank 0: slowness nan"),
        (("keep", 8, (8,), 8, (float("inf"),)), "DP rank 0: slowness inf"),
        (("keep", 8, (8,), 8, (1,), 0), "pp must be at least 1, got 0"),
    ],
)
def test_impossible_batches(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(PlanBatchError, match=message):
        plan_batch(*arguments)  # type: ignore[arg-type]
