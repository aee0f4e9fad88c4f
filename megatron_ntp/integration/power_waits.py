"""How long the healthy replicas wait for the others in gradient sync: measured and shared.

One rank of each replica, its first, times two things per step: the step, and what it spent in the
DP reduction at the end of backward. A replica that is early waits there for the last one, so the
difference between two replicas' times is how far one is behind the other, whatever the reduction
itself takes and without clocks that agree.

[Late] Nothing here ever waits. A step is measured when the next one ends (on a GPU its events have
passed by then), and the measurements of all replicas travel by a gloo all-gather that is only
looked at again when another step has ended. So an observation is two steps old: the controller has
to skip so many more after each change (`STEPS_LATE`).

[Order] Every member issues one gather in every step, with or without a measurement, so gathers
match whatever happens on a rank.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

STEPS_LATE = 2
JOIN_TIMEOUT_S = 10.0
_NOTHING = (-1.0, 0.0, 0.0)


class CpuClock:
    """Marks are seconds."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, last: float) -> float | None:
        return last - first


class GpuClock:
    """Marks are events on the stream that computes; they cost no synchronization."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        """Seconds; None while the GPU has not passed both."""
        return first.elapsed_time(last) / 1000 if last.query() else None


class Report(NamedTuple):
    """One replica's step. `wait_s` is its whole time in the reduction."""

    step: int
    wait_s: float
    step_s: float


@dataclass
class _Step:
    number: int
    begin: Any
    end: Any = None
    waits: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass
class _Gather:
    """One all-gather under way. `own` stays alive with it, since the backend reads from it."""

    work: dist.Work
    own: Tensor
    table: Tensor


class StepWaits:
    """Times this rank's steps and exchanges them with the other members, without blocking.

    Args:
        group: gloo group of all members, or None to only measure (tests).
        clock: CpuClock or GpuClock.
        on_reports: called with the reports of all members, in the order of the group's ranks, as
            soon as they are there; a member that had nothing to report has step -1.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        clock: CpuClock | GpuClock,
        on_reports: Callable[[list[Report]], None],
    ) -> None:
        self._group, self._clock, self._on_reports = group, clock, on_reports
        self._step: _Step | None = None
        self._ended: _Step | None = None
        self._count = 0
        self._under_way: deque[_Gather] = deque()
        self._broken = False

    def begin_step(self) -> None:
        self._step = _Step(self._count, self._clock.mark())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the DP reduction that ends a backward pass."""
        begin = self._clock.mark()
        yield
        if self._step is not None:
            self._step.waits.append((begin, self._clock.mark()))

    def end_step(self) -> None:
        """See [Late]: reports the step before this one, and looks at what has arrived."""
        if self._step is None or self._broken:
            return
        self._step.end = self._clock.mark()
        self._count += 1
        before, self._ended, self._step = self._ended, self._step, None
        try:
            self._take_in()
            self._send(self._measure(before))
        except RuntimeError:
            self._give_up()

    def join(self) -> None:
        """At a regular end, where every member has ended the same steps."""
        give_up_at = time.monotonic() + JOIN_TIMEOUT_S
        try:
            while self._under_way and not self._broken:
                left_s = max(0.01, give_up_at - time.monotonic())
                self._under_way[0].work.wait(timedelta(seconds=left_s))
                self._under_way.popleft()
        except RuntimeError:
            self._give_up()

    @property
    def is_broken(self) -> bool:
        """Whether a peer was lost: this rank reports and hears nothing any more."""
        return self._broken

    def _measure(self, step: _Step | None) -> tuple[float, float, float]:
        if step is None:
            return _NOTHING
        step_s = self._clock.between(step.begin, step.end)
        waits_s = [self._clock.between(first, last) for first, last in step.waits]
        if step_s is None or not waits_s or None in waits_s:
            return _NOTHING
        return (float(step.number), sum(wait for wait in waits_s if wait is not None), step_s)

    def _send(self, report: tuple[float, float, float]) -> None:
        own = torch.tensor(report, dtype=torch.float64, device="cpu")
        table = torch.empty(self._group.size(), len(report), dtype=torch.float64, device="cpu")
        work = dist.all_gather(list(table.unbind()), own, group=self._group, async_op=True)
        self._under_way.append(_Gather(work, own, table))

    def _take_in(self) -> None:
        while self._under_way and self._under_way[0].work.is_completed():
            gather = self._under_way.popleft()
            gather.work.wait()  # over already: only raises what it failed with
            rows = gather.table.tolist()
            self._on_reports([Report(int(row[0]), row[1], row[2]) for row in rows])

    def _give_up(self) -> None:
        """A peer is gone. Training will notice by itself; waits are no longer known."""
        self._broken = True
        self._under_way.clear()


def lag(reports: Sequence[Report], own: int, others: Sequence[int]) -> Report | None:
    """One replica's lag behind others in a step, as the controller wants it.

    Args:
        reports: of all members.
        own: which of them is the replica's.
        others: which are those it is to keep pace with.

    Returns:
        a report whose `wait_s` is what the median of the others waited for this replica (negative:
        it waited for them); None where the reports are not of one step.
    """
    mine = reports[own]
    theirs = [reports[index] for index in others]
    if mine.step < 0 or any(report.step != mine.step for report in theirs):
        return None
    wait_s = statistics.median(report.wait_s for report in theirs) - mine.wait_s
    return Report(mine.step, wait_s, mine.step_s)
