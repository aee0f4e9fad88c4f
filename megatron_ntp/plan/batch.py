"""How many microbatches each replica runs in a step.

A replica of lower TP degree takes longer for the same microbatch. Three policies:

- `keep`: every replica runs the nominal number. Same samples, and the step waits for the slowest.
- `shrink`: reduced replicas run as many as fit into a healthy replica's time. Healthy speed, fewer
  samples.
- `redistribute`: the global batch stays exact, and work moves from slow to fast replicas such that
  the slowest takes as little time as whole microbatches allow.

[Fill] A pipeline of `pp` stages takes the time of `pp - 1` more microbatches to fill and drain
(interleaved schedules take less), so a replica's time is `(share + pp - 1) * slowness`.

Costs are compared as exact fractions, so every rank comes to the same shares on any machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from megatron_ntp.errors import PlanBatchError
from megatron_ntp.plan._checks import require_int


class BatchPolicy(StrEnum):
    """How the microbatches of a step are shared out; see above."""

    KEEP = "keep"
    SHRINK = "shrink"
    REDISTRIBUTE = "redistribute"


BATCH_POLICIES: tuple[str, ...] = tuple(policy.value for policy in BatchPolicy)


@dataclass(frozen=True)
class BatchShares:
    """Microbatches per step of each DP rank, with what the step should cost.

    `slowdown` is the predicted time of a step over that of a healthy job (1.0 = no slower);
    `sample_fraction` the samples of a step over a healthy job's.
    """

    policy: str
    num_microbatches: int
    shares: tuple[int, ...]
    slowdown: float

    @property
    def total(self) -> int:
        """M: microbatches of a step over all replicas. Replica r weighs `shares[r] / M`."""
        return sum(self.shares)

    @property
    def sample_fraction(self) -> float:
        return self.total / (self.num_microbatches * len(self.shares))

    @property
    def relative_throughput(self) -> float:
        """Samples per second over a healthy job's, as predicted."""
        return self.sample_fraction / self.slowdown


def microbatch_shares(
    policy: str,
    num_microbatches: int,
    degrees: Sequence[int],
    nominal_tp: int,
    slowness: Sequence[float | Fraction],
    pp: int = 1,
) -> tuple[int, ...]:
    """Microbatches per step of each DP rank. See `plan_batch`."""
    return plan_batch(policy, num_microbatches, degrees, nominal_tp, slowness, pp).shares


def plan_batch(
    policy: str,
    num_microbatches: int,
    degrees: Sequence[int],
    nominal_tp: int,
    slowness: Sequence[float | Fraction],
    pp: int = 1,
) -> BatchShares:
    """Share out the microbatches of one step.

    `num_microbatches` is what each replica of a healthy job runs. `degrees` and `slowness` go by
    DP rank; slowness is a replica's time for one microbatch over a healthy replica's.
    """
    require_int("num_microbatches", num_microbatches, minimum=1, error=PlanBatchError)
    fill = require_int("pp", pp, minimum=1, error=PlanBatchError) - 1
    _check_replicas(degrees, nominal_tp, slowness)
    costs = [Fraction(value) for value in slowness]
    match parse_policy(policy):
        case BatchPolicy.KEEP:
            shares = (num_microbatches,) * len(costs)
        case BatchPolicy.SHRINK:
            shares = _shrink(num_microbatches, fill, degrees, nominal_tp, costs)
        case BatchPolicy.REDISTRIBUTE:
            shares = _redistribute(num_microbatches * len(costs), fill, costs)
    slowest = max((share + fill) * cost for share, cost in zip(shares, costs, strict=True))
    slowdown = float(slowest / (num_microbatches + fill))
    return BatchShares(str(policy), num_microbatches, shares, slowdown)


def parse_policy(policy: str) -> BatchPolicy:
    """The policy of this name, or PlanBatchError naming those that exist."""
    if policy not in BATCH_POLICIES:
        raise PlanBatchError(
            f"unknown batch policy {policy!r}; policies are {', '.join(BATCH_POLICIES)}"
        )
    return BatchPolicy(policy)


def _check_replicas(
    degrees: Sequence[int], nominal_tp: int, slowness: Sequence[float | Fraction]
) -> None:
    if not degrees or len(degrees) != len(slowness):
        raise PlanBatchError(
            f"one degree and one slowness per replica are needed, got {len(degrees)} degrees "
            f"and {len(slowness)} slowness values"
        )
    for dp_rank, (degree, value) in enumerate(zip(degrees, slowness, strict=True)):
        if not 1 <= degree <= nominal_tp:
            raise PlanBatchError(
                f"DP rank {dp_rank}: TP degree {degree} is outside 1..{nominal_tp} (nominal TP)"
            )
        if not (math.isfinite(value) and value >= 1):
            raise PlanBatchError(
                f"DP rank {dp_rank}: slowness {value} must be a finite number of at least 1 "
                "(1 = a healthy replica)"
            )


def _shrink(
    num_microbatches: int,
    fill: int,
    degrees: Sequence[int],
    nominal_tp: int,
    costs: Sequence[Fraction],
) -> tuple[int, ...]:
    """Healthy replicas run the nominal number; the others what fits into the healthy time.

    Where no replica is healthy, the fastest one takes the place of the healthy ones: nobody would
    be waiting for shares smaller than that.
    """
    healthy = [cost for cost, deg in zip(costs, degrees, strict=True) if deg == nominal_tp]
    pace = max(healthy) if healthy else min(costs)
    shares: list[int] = []
    for dp_rank, (degree, cost) in enumerate(zip(degrees, costs, strict=True)):
        fitting = math.floor((num_microbatches + fill) * pace / cost) - fill
        if fitting < 1:
            least = math.ceil((1 + fill) * cost / pace) - fill
            raise PlanBatchError(
                f"policy shrink: DP rank {dp_rank} (TP degree {degree}, "
                f"{float(cost / pace):.3f} x the time of a healthy replica) cannot finish one "
                f"microbatch while a healthy replica runs {num_microbatches}. Use policy keep, or "
                f"at least {least} microbatches per replica (a larger global batch or a smaller "
                "micro batch)"
            )
        shares.append(min(num_microbatches, fitting))
    return tuple(shares)


def _redistribute(total: int, fill: int, costs: Sequence[Fraction]) -> tuple[int, ...]:
    """Shares of at least 1 that sum to `total` with the least maximum of the replicas' times.

    Handing out microbatches one by one, each to the replica that would finish it first (ties: the
    earlier replica), reaches the exact minimum: microbatch k of a replica finishes at
    `(k + fill) * cost`, and the `total` earliest finishes are taken. The start only skips hand-outs
    that this order makes in any case: it gives nobody a microbatch that finishes after `pace`, by
    which time all replicas together finish no more than `total - len(costs)`.
    """
    inverse = math.fsum(1 / float(cost) for cost in costs)
    pace = Fraction((total - len(costs)) / inverse * (1 - 1e-9))
    shares = [max(1, math.floor(pace / cost) - fill) for cost in costs]
    finishes = [
        ((share + 1 + fill) * cost, dp_rank)
        for dp_rank, (share, cost) in enumerate(zip(shares, costs, strict=True))
    ]
    heapq.heapify(finishes)
    for _ in range(total - sum(shares)):
        finish, dp_rank = finishes[0]
        shares[dp_rank] += 1
        heapq.heapreplace(finishes, (finish + costs[dp_rank], dp_rank))
    return tuple(shares)
