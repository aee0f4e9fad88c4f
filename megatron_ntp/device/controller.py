"""How much power closes the gap: a closed loop without clocks, threads or devices.

Its input are steps: how long each took and how long the healthy replicas waited in it for this one.
Its output is one limit for all GPUs of the replica, which run in lockstep. The rules:

    measure     the median gap of a few steps, taken after the first steps under a new limit passed
    act         only outside a dead band, by the curve of model.py, by a bounded step at most, and
                by half of it each time the sign turned, so that a wrong curve cannot swing for ever
    back off    when a board slows itself down: one step for heat, all the way for a power brake;
                then no way up for a while, and for twice as long each time
    give up     at the ceiling, or where boards draw less than they may: then the gap that is left
                is the batch policy's

Nothing here ever leaves [nominal, ceiling]; the keeper checks that again.
"""

from __future__ import annotations

import enum
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ntp.device.budget import whole_watts
from megatron_ntp.device.model import PowerCurve, PowerSample
from megatron_ntp.device.nvml import SLOWDOWNS, GpuReading

MIN_STEP_MW = 1000
MIN_GAIN = 1 / 16
MAX_HOLD_FACTOR = 32
MAX_SAMPLES_PER_LIMIT = 64
POWER_BRAKE = "hw_power_brake"  # the feed asks for less: not the moment for small steps


class BoostState(enum.StrEnum):
    """Where the loop is. In all states but the first two the gap that is left stays."""

    RAISING = "adjusting"
    HOLDING = "within the target"
    AT_CEILING = "at the ceiling"
    SLOWED = "backed off: boards slow themselves down"
    NOT_POWER_BOUND = "boards do not use the power they have"
    NO_HEADROOM = "no headroom"
    OFF = "off"


@dataclass(frozen=True)
class ControlSettings:
    """The loop's constants."""

    target_gap: float = 0.01  # within this share of a step the replica keeps pace
    max_step: float = 0.1  # of nominal, per change
    settle_steps: int = 1  # not judged after a change: the limit changed within them
    window_steps: int = 2  # whose median is judged while the limit is being found
    hold_window_steps: int = 8  # whose median is judged while the target is met: hysteresis
    hold_steps: int = 50  # no raise after a slowdown
    slack: float = 0.85  # of the limit; below it, without a power cap, power is not what is missing


@dataclass(frozen=True)
class Observation:
    """One step. `wait_s`: what the healthy replicas waited for this one; negative: it for them."""

    step: int
    wait_s: float
    step_s: float

    @property
    def gap(self) -> float:
        return self.wait_s / self.step_s

    @property
    def work_s(self) -> float:
        """The replica's own time: the whole step, unless it waited for others itself."""
        return self.step_s + min(0.0, self.wait_s)


@dataclass
class Controller:
    """One reduced replica's loop on one node. The caller sets what `decide` returns."""

    nominal_mw: int
    ceiling_mw: int
    expected_gap: float  # before any boost, e.g. model.reduction_gap(8, 7)
    curve: PowerCurve = field(default_factory=PowerCurve)
    settings: ControlSettings = field(default_factory=ControlSettings)
    state: BoostState = BoostState.RAISING
    limit_mw: int = 0
    _window: deque[Observation] = field(default_factory=deque)
    _work_s: dict[int, list[float]] = field(default_factory=dict)  # under each limit, the last few
    _to_skip: int = 0
    _hold: int = 0
    _gap: float | None = None
    _gap_limit_mw: int = 0  # under which it was measured
    _gain: float = 1.0
    _unused: bool = False
    _next_hold: int = 0

    def __post_init__(self) -> None:
        self._next_hold = self.settings.hold_steps
        self.limit_mw = self.limit_mw or self.nominal_mw
        if self.ceiling_mw <= self.nominal_mw:
            self.state = BoostState.NO_HEADROOM

    # ---- what comes in ----

    def observe(self, observation: Observation) -> None:
        """Takes one step in. Steps too short to measure, or with odd clocks, are not taken."""
        if observation.step_s <= 0 or observation.work_s <= 0 or abs(observation.gap) >= 1:
            return
        self._hold = max(0, self._hold - 1)
        if self._to_skip > 0:
            self._to_skip -= 1
            return
        self._window.append(observation)
        while len(self._window) > self._window_steps:
            self._window.popleft()

    def watch(self, readings: Mapping[str, GpuReading | None]) -> int | None:
        """Looks at the boards. Returns a lower limit if they slow themselves down."""
        seen = [reading for reading in readings.values() if reading is not None]
        self._unused = bool(seen) and all(self._has_slack(reading) for reading in seen)
        if not any(SLOWDOWNS & set(reading.reasons) for reading in seen):
            return None
        just_lowered = self.state is BoostState.SLOWED and self._to_skip > 0
        if self.limit_mw <= self.nominal_mw or just_lowered:
            return None
        self.state, self._hold = BoostState.SLOWED, self._next_hold
        self._next_hold = min(2 * self._next_hold, MAX_HOLD_FACTOR * self.settings.hold_steps)
        braked = any(POWER_BRAKE in reading.reasons for reading in seen)
        return self._changed(self.nominal_mw if braked else self.limit_mw - self._max_step_mw)

    def applied(self, enforced_mw: int) -> None:
        """What the boards obey after a change. Less than asked is a ceiling from elsewhere."""
        if enforced_mw < self.limit_mw:
            self.ceiling_mw = max(self.nominal_mw, enforced_mw)
            self.limit_mw = self.ceiling_mw

    # ---- what comes out ----

    def decide(self) -> int | None:
        """The limit to set now; None to leave it."""
        if len(self._window) < self._window_steps:
            return None
        gap = statistics.median(entry.gap for entry in self._window)
        if self._gap_limit_mw != self.limit_mw and self._gap is not None:
            turned = self._gap * gap < 0
            self._gain = max(MIN_GAIN, self._gain / 2) if turned else min(1.0, 2 * self._gain)
        self._gap, self._gap_limit_mw = gap, self.limit_mw
        work_s = statistics.median(entry.work_s for entry in self._window)
        self._work_s.setdefault(self.limit_mw, []).append(work_s)
        del self._work_s[self.limit_mw][:-MAX_SAMPLES_PER_LIMIT]
        if self.state is BoostState.NO_HEADROOM:
            return None
        if abs(gap) <= self.settings.target_gap:
            self.state = BoostState.HOLDING
            return None
        return self._lower() if gap < 0 else self._raise()

    def remaining_gap(self) -> float:
        """The share of a step that power will not win back, for the batch policy.

        While the limit still rises this is what the curve predicts for the ceiling, so that the
        batch policy does not take on what power is about to do.
        """
        if self.state is BoostState.HOLDING:
            return 0.0
        if self._gap is None:
            return self.curve.gap_at(self.expected_gap, self.nominal_mw, self.ceiling_mw)
        if self.state is BoostState.RAISING:
            return self.curve.gap_at(max(0.0, self._gap), self._gap_limit_mw, self.ceiling_mw)
        return max(0.0, self._gap)

    @property
    def measured_gap(self) -> float | None:
        """The last judged gap; None before the first."""
        return self._gap

    def samples(self) -> list[PowerSample]:
        """What was measured, one sample for each limit that was tried."""
        return [
            PowerSample(limit_mw, 1 / statistics.median(seconds))
            for limit_mw, seconds in self._work_s.items()
        ]

    # ---- steps ----

    @property
    def _window_steps(self) -> int:
        holding = self.state is BoostState.HOLDING
        return self.settings.hold_window_steps if holding else self.settings.window_steps

    @property
    def _max_step_mw(self) -> int:
        return max(MIN_STEP_MW, whole_watts(self.nominal_mw * self.settings.max_step))

    def _raise(self) -> int | None:
        if self._hold > 0:
            self.state = BoostState.SLOWED
            return None
        if self.limit_mw >= self.ceiling_mw:
            self.state = BoostState.AT_CEILING
            return None
        if self._unused:
            self.state = BoostState.NOT_POWER_BOUND
            return None
        self.state = BoostState.RAISING
        return self._changed(min(self._target_mw(), self.limit_mw + self._max_step_mw))

    def _lower(self) -> int | None:
        if self.limit_mw <= self.nominal_mw:
            self.state = BoostState.HOLDING  # ahead of the others without any boost
            return None
        self.state = BoostState.RAISING
        return self._changed(max(self._target_mw(), self.limit_mw - self._max_step_mw))

    def _target_mw(self) -> int:
        assert self._gap is not None
        full_mw = self.curve.power_for(self.limit_mw, 1 / (1 - self._gap))
        return whole_watts(self.limit_mw + self._gain * (full_mw - self.limit_mw))

    def _changed(self, limit_mw: int) -> int | None:
        bounded_mw = max(self.nominal_mw, min(self.ceiling_mw, limit_mw))
        if bounded_mw == self.limit_mw:
            return None
        self.limit_mw = bounded_mw
        self._window.clear()
        self._to_skip = self.settings.settle_steps
        return bounded_mw

    def _has_slack(self, reading: GpuReading) -> bool:
        if reading.draw_mw is None or "sw_power_cap" in reading.reasons:
            return False
        return reading.draw_mw < self.settings.slack * self.limit_mw
