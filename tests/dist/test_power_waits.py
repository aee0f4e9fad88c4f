"""Reports of steps travel between two gloo ranks: complete, in order, and never waited for."""

from __future__ import annotations

import os
import time
from typing import Any

import torch.distributed as dist
from ranks import run_ranks, start

from megatron_ntp.integration.power_waits import CpuClock, Report, StepWaits


class LateClock(CpuClock):
    """A GPU that has not passed its events yet, in one step."""

    def __init__(self, late_step: int) -> None:
        self.late_step, self.asked = late_step, 0

    def between(self, first: float, last: float) -> float | None:
        if self.begins[self.late_step :][:1] == [first]:
            return None
        return super().between(first, last)

    def mark(self) -> float:
        found = super().mark()
        self.marks = [*getattr(self, "marks", []), found]
        return found

    @property
    def begins(self) -> list[float]:
        return self.marks[::4]  # begin, two around the reduction, end


def make(heard: list[list[Report]], clock: CpuClock) -> StepWaits:
    dist.init_process_group("gloo")
    return StepWaits(dist.new_group([0, 1], backend="gloo"), clock, heard.append)


def step(waits: StepWaits, wait_s: float = 0.0) -> float:
    """One step; returns what its end took, in seconds of this thread."""
    waits.begin_step()
    with waits.waiting():
        time.sleep(wait_s)
    started = time.thread_time()
    waits.end_step()
    return time.thread_time() - started


def ten_steps() -> Any:
    heard: list[list[Report]] = []
    rank = int(os.environ["RANK"])
    waits = make(heard, LateClock(3) if rank == 1 else CpuClock())
    for _ in range(10):
        step(waits, 0.01 if rank == 0 else 0.03)
        dist.barrier()
    early = len(heard)
    waits.join()
    return early, heard


def test_every_step_is_heard_of_in_order_and_two_steps_late() -> None:
    (early, heard), (_, also_heard) = run_ranks(ten_steps, 2)
    assert heard == also_heard, "all members hear the same"
    assert 8 <= early <= 10 and len(heard) == early
    steps = [[report.step for report in reports] for reports in heard]
    expected = [[-1, -1], [0, 0], [1, 1], [2, 2], [3, -1], [4, 4], [5, 5], [6, 6], [7, 7]]
    assert steps[: len(expected)] == expected[: len(steps)], "step 3 of rank 1 was not measured"
    for zero, one in heard[1:4]:
        assert 0.01 <= zero.wait_s < 0.03 <= one.wait_s < one.step_s


def stalled_peer() -> Any:
    heard: list[list[Report]] = []
    waits = make(heard, CpuClock())
    dist.barrier()
    started = time.monotonic()
    if os.environ["RANK"] == "1":
        time.sleep(3)
    costs_s = [step(waits) for _ in range(50)]
    took_s = time.monotonic() - started
    waits.join()
    return took_s, sum(costs_s) / len(costs_s), waits.is_broken


def test_a_stalled_peer_is_not_waited_for() -> None:
    (took_s, cost_s, broken), (_, other_cost_s, _) = run_ranks(stalled_peer, 2)
    print(f"{1e3 * cost_s:.2f} and {1e3 * other_cost_s:.2f} ms per step")
    assert took_s < 2 and not broken
    assert max(cost_s, other_cost_s) < 0.001


def lost_peer() -> Any:
    waits = make([], CpuClock())
    for count in range(60):
        if os.environ["RANK"] == "1" and count == 5:
            os._exit(7)
        step(waits)
        time.sleep(0.02)
    waits.join()
    return waits.is_broken


def test_a_lost_peer_ends_the_exchange_and_nothing_else() -> None:
    run = start(lost_peer, 2, grace_s=None)
    assert run.statuses == [0, 7], run.describe()
    assert run.results[0] is True
