"""Whether a job hangs, from what its ranks last said. Pure.

[All of them] Ranks wait for each other in every step, and one that saves or compiles keeps the
others from their next step. So a job hangs if *no* rank has moved for longer than any of them may
take in its phase. Steps get a deadline learned from earlier steps; start, load, the first step,
evaluating and saving have generous ones of their own.

[Other loops] Only the steps of Megatron's own loop are seen. A training loop of another library may
take for ever, once it has made its process groups.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ntp.beats import FIRST_STEP, PHASES, Beat

_NUM_RECENT = 200
_MOST_NAMED = 8
STOPPED_STATES = ("T", "t")
"""States of a process in /proc that explain why it does not move: stopped, or being traced."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds without any sign of a rank, by what it is doing. A user may set each.

    A step may take the larger of `step_min_s` and `step_factor` x the longest of the last steps;
    `step_s` takes the place of both.
    """

    start_s: float = 900.0
    load_s: float = 1800.0
    first_step_s: float = 1800.0
    eval_s: float = 1800.0
    save_s: float = 1800.0
    step_min_s: float = 300.0
    step_factor: float = 5.0
    step_s: float | None = None

    def of_step(self, longest_s: float) -> float:
        """For a step where the longest of the last ones took `longest_s`."""
        if self.step_s is not None:
            return self.step_s
        return max(self.step_min_s, self.step_factor * longest_s)


@dataclass(frozen=True)
class Sign:
    """A rank's last sign, `age_s` seconds ago. `state` is its process's, a letter as in /proc."""

    rank: int
    phase: str = PHASES[0]
    iteration: int = -1
    age_s: float = 0.0
    stepped: bool = False
    state: str = ""

    @classmethod
    def of(cls, beat: Beat, now: float, state: str) -> Sign:
        """From a beat, at CLOCK_MONOTONIC `now`."""
        stepped = FIRST_STEP in beat.marks
        return cls(beat.rank, beat.phase, beat.iteration, now - beat.since, stepped, state)


@dataclass(frozen=True)
class Stall:
    """A hang: how long nothing moved, and the ranks furthest behind."""

    silent_s: float
    deadline_s: float
    ranks: tuple[int, ...]
    reason: str


class StepTimes:
    """Times between completed steps as one rank's beats tell; keeps those of the last steps."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._last: tuple[int, float] | None = None

    def see(self, beat: Beat) -> None:
        """Notes a beat; called often, also if nothing has changed."""
        if beat.phase != "train" or FIRST_STEP not in beat.marks:
            self._last = None  # the next step follows what is no step
            return
        if self._last is None or beat.iteration < self._last[0]:
            self._last = beat.iteration, beat.since
        elif beat.iteration > self._last[0]:
            steps, since = beat.iteration - self._last[0], beat.since - self._last[1]
            self._recent.append(since / steps)
            self._last = beat.iteration, beat.since

    @property
    def longest_s(self) -> float:
        return max(self._recent, default=0.0)


def limit_s(sign: Sign, deadlines: Deadlines, longest_s: float) -> float:
    """How long a rank may take for what it is doing."""
    if sign.phase == "train":
        return deadlines.of_step(longest_s) if sign.stepped else deadlines.first_step_s
    by_phase = {
        "other": math.inf,  # see [Other loops]
        "load": deadlines.load_s,
        "eval": deadlines.eval_s,
        "save": deadlines.save_s,
    }
    return by_phase.get(sign.phase, deadlines.start_s)


def find_stall(
    signs: Mapping[int, Sign], world_size: int, age_s: float, deadlines: Deadlines, longest_s: float
) -> Stall | None:
    """The hang of a job, if it hangs. See [All of them].

    Args:
        signs: by rank, of those that have given one.
        world_size: how many there should be; the others count as starting.
        age_s: since the ranks were started.
        deadlines: what the user allows.
        longest_s: longest of the last steps.
    """
    everyone = [signs.get(rank, Sign(rank, age_s=age_s)) for rank in range(world_size)]
    deadline = max(limit_s(sign, deadlines, longest_s) for sign in everyone)
    silent = min(sign.age_s for sign in everyone)
    if silent <= deadline:
        return None
    behind = furthest_behind(everyone)
    names = ", ".join(map(str, behind[:_MOST_NAMED])) + (
        " ..." if len(behind) > _MOST_NAMED else ""
    )
    first = next(sign for sign in everyone if sign.rank == behind[0])
    reason = (
        f"no rank moved for {silent:.1f} s (deadline {deadline:.1f} s); furthest behind: rank "
        f"{names}, in {first.phase} after step {first.iteration}"
    )
    if first.state in STOPPED_STATES:
        reason += ", stopped by a signal"
    return Stall(silent, deadline, tuple(behind), reason)


def furthest_behind(signs: Sequence[Sign]) -> list[int]:
    """The ranks that hold the job up: stopped ones if there are, else those with the least done."""
    stopped = [sign.rank for sign in signs if sign.state in STOPPED_STATES]
    if stopped:
        return stopped

    def done(sign: Sign) -> tuple[int, int]:
        return sign.iteration, PHASES.index(sign.phase) if sign.iteration < 0 else 0

    least = min(map(done, signs))
    return [sign.rank for sign in signs if done(sign) == least]
