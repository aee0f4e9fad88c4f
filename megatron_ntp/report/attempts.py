"""From a log of events to attempts and goodput. Pure; the fields are named in `events`.

[Goodput] is useful step time over wall time. Useful are steps that were not done again: of an
attempt, those up to the earliest checkpoint that a later attempt went on from. A step's time is the
mean of its attempt, from the end of the first step to that of the last, saves in between included;
the first step of an attempt counts as one such step, what it takes longer as lost. Wall time goes
from the first event of the log to the last, whatever happened in between.

[Cut short] Of an attempt whose supervisor was killed nobody knows when it ended, until the next
supervisor. Its steps count with the mean time of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

Event = dict[str, Any]

CUT_SHORT = "its supervisor was killed"
UNFINISHED = "unfinished"
_SECONDS = ("detection_s", "stop_s", "health_s", "planning_s", "start_s", "load_s", "first_step_s")
_COUNTS = ("stepping", "first-step", "step-progress", "trained", "attempt-ended")
_OF_ATTEMPT = (*_COUNTS, "attempt-started", "fault-injected", "fault-detected")


@dataclass
class Attempt:
    """One attempt; None stands for what the log does not tell.

    Attributes:
        started_s: when its ranks were started, in seconds from the first event.
        resumed_at: steps that the job had completed in the checkpoint it went on from.
        reached: steps that the job had completed when it ended.
        steps_lost: completed steps that were done again later.
        fault_s: when the fault happened that ended it, or the last sign of a rank before.
        stop_s: that its supervisor took to end all of it.
        down_s: from the fault that ended it to the end of the next attempt's first step.
        stepping_s: from the end of its first step to that of its last.
        points: (seconds, steps completed) as the log tells them.
    """

    number: int
    started_s: float
    degrees: tuple[int, ...] = ()
    digest: str = ""
    reason: str = ""
    status: int | None = None
    resumed_at: int | None = None
    reached: int | None = None
    steps_lost: int = 0
    detection_s: float | None = None
    stop_s: float | None = None
    health_s: float | None = None
    planning_s: float | None = None
    start_s: float | None = None
    load_s: float | None = None
    first_step_s: float | None = None
    stepping_s: float | None = None
    down_s: float | None = None
    ended_s: float | None = None
    points: list[tuple[float, int]] = field(default_factory=list)
    fault_s: float | None = None
    trained_s: float | None = None

    @property
    def num_steps(self) -> int:
        if self.reached is None or self.resumed_at is None:
            return 0
        return max(0, self.reached - self.resumed_at)

    @property
    def step_s(self) -> float | None:
        """Mean time of a step; None if fewer than two were seen."""
        if self.stepping_s is None or self.num_steps < 2:
            return None
        return self.stepping_s / (self.num_steps - 1)


@dataclass(frozen=True)
class Report:
    """A whole job.

    Attributes:
        outcome: `finished`, `ended with status N`, or `UNFINISHED`; and why.
        useful_step_s: see [Goodput].
        faults_armed, faults_fired: what --ntp-inject asked for, and what of it has happened.
    """

    attempts: tuple[Attempt, ...]
    outcome: str
    wall_s: float
    num_useful_steps: int
    useful_step_s: float
    faults_armed: tuple[str, ...] = ()
    faults_fired: tuple[str, ...] = ()

    @property
    def goodput(self) -> float | None:
        return self.useful_step_s / self.wall_s if self.wall_s > 0 else None

    @property
    def steps_lost(self) -> int:
        return sum(attempt.steps_lost for attempt in self.attempts)

    @property
    def faults_pending(self) -> tuple[str, ...]:
        """Asked for, and not happened. One that is asked for twice may happen once."""
        left = list(self.faults_fired)
        pending = []
        for fault in self.faults_armed:
            if fault in left:
                left.remove(fault)
            else:
                pending.append(fault)
        return tuple(pending)

    def as_json(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "wall_s": self.wall_s,
            "num_useful_steps": self.num_useful_steps,
            "useful_step_s": self.useful_step_s,
            "goodput": self.goodput,
            "steps_lost": self.steps_lost,
            "faults_armed": list(self.faults_armed),
            "faults_fired": list(self.faults_fired),
            "faults_pending": list(self.faults_pending),
            "attempts": [asdict(attempt) for attempt in self.attempts],
        }


def report(events: Sequence[Event]) -> Report:
    """The report of a log that has at least one event."""
    start = _time(events[0])
    attempts = _attempts(events, start)
    _count_lost(attempts)
    _measure_down(attempts)
    mean_s = _mean_step_s(attempts)
    num_useful, useful_s = 0, 0.0
    for attempt in attempts:
        useful = attempt.num_steps - attempt.steps_lost
        step_s = attempt.step_s if attempt.step_s is not None else mean_s
        num_useful += useful
        useful_s += useful * step_s
    return Report(
        attempts=tuple(attempts),
        outcome=_outcome(events),
        wall_s=_time(events[-1]) - start,
        num_useful_steps=num_useful,
        useful_step_s=useful_s,
        faults_armed=tuple(f for e in _named(events, "faults-armed") for f in e["faults"]),
        faults_fired=tuple(e["fault"] for e in _named(events, "fault-injected")),
    )


def _attempts(events: Sequence[Event], start: float) -> list[Attempt]:
    found: list[Attempt] = []
    for event in events:
        name, at = event["event"], _time(event) - start
        if name in ("supervisor-started", "attempt-started"):
            _cut_short(found, at)
        if name == "attempt-started":
            found.append(Attempt(event.get("attempt", len(found) + 1), at))
        if found and name in _OF_ATTEMPT and event.get("attempt") in (None, found[-1].number):
            _add(found[-1], event, at)
    for attempt in found:
        _measure_stepping(attempt)
    return found


def _add(attempt: Attempt, event: Event, at: float) -> None:
    """What one event says of an attempt."""
    name = event["event"]
    for key in _SECONDS:
        if event.get(key) is not None:
            setattr(attempt, key, float(event[key]))
    attempt.degrees = tuple(event.get("degrees") or attempt.degrees)
    attempt.digest = event.get("digest") or attempt.digest
    if name == "attempt-started":
        attempt.resumed_at = max(0, event.get("checkpoint", -1))
    if name == "stepping":
        attempt.resumed_at = event["iteration"] - 1  # what ranks found whole may be an older one
    if name in _COUNTS:
        _count(attempt, event.get("iteration", -1) if "step" not in event else event["step"], at)
    if name == "fault-injected" and _ends_a_rank(event):
        attempt.fault_s = min(at, attempt.fault_s or at)
    if name == "fault-detected":
        last_sign = at - (attempt.detection_s or 0.0)
        attempt.fault_s = min(last_sign, attempt.fault_s or last_sign)
    if name in ("fault-detected", "attempt-ended"):
        attempt.reason = attempt.reason or event.get("reason") or ""
    if name == "trained":
        attempt.trained_s = at
    if name == "attempt-ended":
        attempt.status = event.get("status")
        attempt.ended_s = attempt.ended_s or at


def _count(attempt: Attempt, step: int, at: float) -> None:
    if step >= 0 and (attempt.reached is None or step > attempt.reached):
        attempt.reached = step
        attempt.points.append((at, step))


def _measure_stepping(attempt: Attempt) -> None:
    """To when its ranks had trained, or a fault struck; unknown for one that was [Cut short]."""
    if not attempt.points or attempt.reason == CUT_SHORT:
        return
    ends = [attempt.trained_s, attempt.fault_s]
    if attempt.ended_s is not None:
        ends.append(attempt.ended_s - (attempt.stop_s or 0.0))
    last_s = next((at for at in ends if at is not None), attempt.points[-1][0])
    attempt.stepping_s = max(0.0, last_s - attempt.points[0][0])


def _ends_a_rank(event: Event) -> bool:
    return not str(event.get("fault", "")).startswith("corrupt-checkpoint")


def _cut_short(attempts: list[Attempt], at: float) -> None:
    """See [Cut short]. `at`: when a new supervisor or attempt shows that the last one is over."""
    if attempts and attempts[-1].ended_s is None:
        attempts[-1].ended_s = at
        attempts[-1].reason = attempts[-1].reason or CUT_SHORT


def _count_lost(attempts: Sequence[Attempt]) -> None:
    earliest: int | None = None  # that a later attempt went on from
    for attempt in reversed(attempts):
        resumed, reached = attempt.resumed_at, attempt.reached
        if earliest is not None and reached is not None and resumed is not None:
            attempt.steps_lost = max(0, reached - max(earliest, resumed))
        if resumed is not None:
            earliest = resumed if earliest is None else min(earliest, resumed)


def _measure_down(attempts: Sequence[Attempt]) -> None:
    for attempt, following in itertools.pairwise(attempts):
        since = attempt.fault_s if attempt.fault_s is not None else attempt.ended_s
        if since is not None and following.points:
            attempt.down_s = following.points[0][0] - since


def _mean_step_s(attempts: Iterable[Attempt]) -> float:
    """Over all attempts; of those with two steps at least."""
    measured = [a for a in attempts if a.step_s is not None]
    num_steps = sum(a.num_steps - 1 for a in measured)
    return sum(a.stepping_s or 0.0 for a in measured) / num_steps if num_steps else 0.0


def _outcome(events: Sequence[Event]) -> str:
    """How the last supervisor ended, if it did."""
    ends = [e for e in events if e["event"] in ("supervisor-started", "finished")]
    if not ends or ends[-1]["event"] != "finished":
        return UNFINISHED
    status, reason = ends[-1].get("status", 0), ends[-1].get("reason", "")
    told = "finished" if status == 0 else f"ended with status {status}"
    return f"{told}: {reason}" if reason else told


def _named(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _time(event: Event) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
