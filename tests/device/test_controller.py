"""The closed loop against simulated boards: pace, bounds, hysteresis and backing off."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ntp.device.controller import BoostState, Controller, ControlSettings, Observation
from megatron_ntp.device.model import PowerCurve, fit_curve, reduction_gap
from megatron_ntp.device.nvml import GpuReading, PowerLimits
from megatron_ntp.integration.power_waits import STEPS_LATE

NOMINAL_MW, MAX_MW = 525_000, 700_000


def reading(limit_mw: int, *reasons: str, draw_share: float = 1.0) -> GpuReading:
    limits = PowerLimits(limit_mw, limit_mw, MAX_MW, 200_000, MAX_MW)
    return GpuReading(
        "GPU", "board", limits, int(limit_mw * draw_share), 1500, 1980, 60, 0, reasons
    )


@dataclass
class Replica:
    """A reduced replica beside healthy ones at nominal: full degree 8, boards of power^exponent."""

    controller: Controller
    degree: int = 7
    exponent: float = 0.5
    noise: float = 0.0
    late: int = 0  # steps after which a step is known
    under_way: list[Observation] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def step(self, index: int, draw: float = 0.0) -> None:
        healthy_s = 1.0
        speedup = (self.controller.limit_mw / self.controller.nominal_mw) ** self.exponent
        own_s = 8 / self.degree / speedup * (1 + self.noise * draw)
        self.gaps.append((own_s - healthy_s) / max(own_s, healthy_s))
        self.under_way.append(Observation(index, own_s - healthy_s, max(own_s, healthy_s)))
        if len(self.under_way) <= self.late:
            return
        self.controller.observe(self.under_way.pop(0))
        before_mw = self.controller.limit_mw
        decided = self.controller.decide()
        if decided is not None:
            assert decided == self.controller.limit_mw != before_mw
            assert abs(decided - before_mw) <= 0.1 * self.controller.nominal_mw
            assert self.controller.nominal_mw <= decided <= self.controller.ceiling_mw
            self.changes.append(decided)
            self.controller.applied(decided)

    def run(self, steps: int, draws: list[float] | None = None) -> None:
        for index in range(steps):
            self.step(index, draws[index] if draws else 0.0)


def replica(
    ceiling_mw: int = MAX_MW, degree: int = 7, assumed: float = 0.5, **fields: Any
) -> Replica:
    controller = Controller(NOMINAL_MW, ceiling_mw, reduction_gap(8, degree), PowerCurve(assumed))
    return Replica(controller, degree, **fields)


def test_8_to_7_with_room_keeps_pace_within_20_steps() -> None:
    """Nominal at 75 % of the board's maximum, budget 1.33 x."""
    sim = replica()
    sim.run(20)
    assert all(abs(gap) <= 0.01 for gap in sim.gaps[12:])
    assert sim.controller.state is BoostState.HOLDING and sim.controller.remaining_gap() == 0.0
    assert sim.controller.limit_mw == pytest.approx(NOMINAL_MW * (8 / 7) ** 2, rel=0.02)


@pytest.mark.parametrize("degree", [7, 6])
def test_observations_as_late_as_in_training_still_suffice(degree: int) -> None:
    """The training hook hears of a step two steps later, and has as many more skipped."""
    sim = replica(degree=degree, late=STEPS_LATE)
    settings = sim.controller.settings
    sim.controller.settings = replace(settings, settle_steps=settings.settle_steps + STEPS_LATE)
    sim.run(20)
    if degree == 7:
        assert all(abs(gap) <= 0.01 for gap in sim.gaps[17:]), sim.gaps
        sim.run(40)
        assert all(abs(gap) <= 0.01 for gap in sim.gaps[17:]), "no swinging"
    else:
        assert sim.controller.limit_mw == MAX_MW
    assert sim.changes == sorted(sim.changes), "no way back down"


def test_default_budget_stops_at_8_sevenths_and_reports_what_is_left() -> None:
    ceiling_mw = NOMINAL_MW * 8 // 7
    sim = replica(ceiling_mw)
    sim.run(20)
    left = 1 - 7 / 8 * (8 / 7) ** 0.5
    assert sim.controller.state is BoostState.AT_CEILING
    assert sim.controller.limit_mw == ceiling_mw
    assert sim.controller.remaining_gap() == pytest.approx(left, abs=0.001)
    assert 0.45 < left / reduction_gap(8, 7) < 0.55, "n/n' alone closes about half of the gap"


def test_8_to_5_goes_to_the_ceiling_and_stays() -> None:
    sim = replica(degree=5)
    sim.run(40)
    assert sim.controller.state is BoostState.AT_CEILING and sim.controller.limit_mw == MAX_MW
    assert sim.controller.remaining_gap() == pytest.approx(
        1 - 5 / 8 * (MAX_MW / NOMINAL_MW) ** 0.5, abs=0.001
    )
    assert sim.changes[-1] == MAX_MW and len(sim.changes) <= 4


@pytest.mark.parametrize("exponent", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("assumed", [0.35, 0.5, 0.8])
def test_a_wrong_curve_costs_steps_and_not_the_target(exponent: float, assumed: float) -> None:
    sim = replica(ceiling_mw=900_000, assumed=assumed, exponent=exponent)
    sim.run(60)
    assert sim.controller.state is BoostState.HOLDING
    assert all(abs(gap) <= 0.01 for gap in sim.gaps[45:])


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_chased(seed: int) -> None:
    """Steps that vary by 0.8 % around a dead band of 1 %."""
    draw = random.Random(seed)
    sim = replica(noise=0.008)
    draws = [draw.uniform(-1, 1) for _ in range(330)]
    sim.run(30, draws[:30])
    before = len(sim.changes)
    sim.run(300, draws[30:])
    assert len(sim.changes) - before <= 1


def test_limit_comes_down_when_the_replica_is_ahead() -> None:
    sim = replica()
    sim.run(20)
    sim.degree = 8  # as after a batch policy took work away
    sim.run(40)
    assert sim.controller.limit_mw < 1.02 * NOMINAL_MW
    assert sim.controller.state is BoostState.HOLDING


def test_no_headroom_never_moves_and_reports_the_gap() -> None:
    sim = replica(ceiling_mw=NOMINAL_MW)
    assert sim.controller.remaining_gap() == pytest.approx(0.125)
    sim.run(10)
    assert sim.changes == [] and sim.controller.state is BoostState.NO_HEADROOM
    assert sim.controller.remaining_gap() == pytest.approx(0.125)


def test_gap_is_not_handed_on_while_power_is_still_closing_it() -> None:
    sim = replica()
    assert sim.controller.remaining_gap() == pytest.approx(0, abs=1e-3)
    sim.run(5)
    assert sim.controller.state is BoostState.RAISING
    assert sim.gaps[-1] > 0.02 and sim.controller.remaining_gap() < 0.005


# ---- slowdowns ----


@pytest.mark.parametrize("reason", ["sw_thermal", "hw_thermal", "hw_slowdown"])
def test_heat_costs_one_step_and_then_patience(reason: str) -> None:
    sim = replica(ceiling_mw=571_000)
    sim.run(20)
    assert sim.controller.limit_mw == 571_000
    lowered = sim.controller.watch({"a": reading(571_000), "b": reading(571_000, reason)})
    assert lowered == NOMINAL_MW and sim.controller.state is BoostState.SLOWED
    sim.controller.applied(lowered)
    sim.run(40)
    assert sim.changes[-1] == 571_000 and sim.controller.limit_mw == NOMINAL_MW
    assert sim.controller.remaining_gap() > 0.1, "what heat takes is the batch policy's"
    sim.run(20)
    assert sim.controller.limit_mw == 571_000, "after the hold it tries again"


def test_repeated_slowdowns_wait_twice_as_long_each_time() -> None:
    sim = replica(ceiling_mw=571_000)
    waits = []
    for _ in range(4):
        steps = 0
        while sim.controller.limit_mw < 571_000:
            sim.step(steps)
            steps += 1
        waits.append(steps)
        lowered = sim.controller.watch({"a": reading(571_000, "sw_thermal")})
        assert lowered is not None
        sim.controller.applied(lowered)
    assert waits[1] >= 50 and waits[2] >= 1.8 * waits[1] and waits[3] >= 1.8 * waits[2]


def test_power_brake_goes_all_the_way_down_at_once() -> None:
    sim = replica()
    sim.run(20)
    assert sim.controller.limit_mw > 650_000
    lowered = sim.controller.watch({"a": reading(680_000, "hw_power_brake", "hw_slowdown")})
    assert lowered == NOMINAL_MW


def test_power_cap_is_not_a_slowdown() -> None:
    sim = replica()
    sim.run(20)
    assert sim.controller.watch({"a": reading(680_000, "sw_power_cap")}) is None
    assert sim.controller.watch({"a": None}) is None


def test_nothing_goes_below_nominal() -> None:
    sim = replica()
    assert sim.controller.watch({"a": reading(NOMINAL_MW, "sw_thermal")}) is None
    assert sim.controller.limit_mw == NOMINAL_MW


def test_boards_that_do_not_use_their_power_get_no_more() -> None:
    sim = replica()
    sim.controller.watch({"a": reading(NOMINAL_MW, draw_share=0.6)})
    sim.run(10)
    assert sim.changes == [] and sim.controller.state is BoostState.NOT_POWER_BOUND
    assert sim.controller.remaining_gap() == pytest.approx(0.125)
    sim.controller.watch({"a": reading(NOMINAL_MW, "sw_power_cap")})
    sim.run(20)
    assert abs(sim.gaps[-1]) <= 0.01


def test_enforced_value_below_the_request_becomes_the_ceiling() -> None:
    sim = replica()
    sim.run(2)
    assert sim.changes == [577_000]
    sim.controller.applied(550_000)
    sim.run(10)
    assert sim.controller.ceiling_mw == sim.controller.limit_mw == 550_000
    assert sim.controller.state is BoostState.AT_CEILING


# ---- input ----


@pytest.mark.parametrize(("wait_s", "step_s"), [(0.1, 0.0), (0.1, -1.0), (2.0, 1.0), (-3.0, 1.0)])
def test_impossible_timings_are_not_taken(wait_s: float, step_s: float) -> None:
    sim = replica()
    for index in range(20):
        sim.controller.observe(Observation(index, wait_s, step_s))
        assert sim.controller.decide() is None
    assert sim.controller.measured_gap is None


def test_steps_in_flight_during_a_change_are_not_judged() -> None:
    controller = Controller(
        NOMINAL_MW, MAX_MW, 0.125, settings=ControlSettings(settle_steps=2, window_steps=1)
    )
    controller.observe(Observation(0, 0.1, 1.0))
    assert controller.decide() == 577_000
    for index in (1, 2):
        controller.observe(Observation(index, 0.1, 1.0))
        assert controller.decide() is None
    controller.observe(Observation(3, 0.1, 1.0))
    assert controller.decide() == 629_000


def test_samples_of_the_loop_give_the_curve() -> None:
    sim = replica(exponent=0.4)
    sim.run(40)
    curve = fit_curve(sim.controller.samples())
    assert curve is not None and curve.exponent == pytest.approx(0.4, abs=0.01)


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(
        st.tuples(
            st.floats(-2, 2, allow_nan=False),
            st.floats(-0.5, 3, allow_nan=False),
            st.sampled_from(["", "sw_thermal", "hw_power_brake", "sw_power_cap"]),
            st.sampled_from([0, 0, 0, 40_000]),
        ),
        max_size=60,
    )
)
def test_whatever_comes_in_the_limit_stays_in_its_bounds(
    events: list[tuple[float, float, str, int]],
) -> None:
    controller = Controller(NOMINAL_MW, MAX_MW, 0.125)
    ceiling_mw = MAX_MW
    for index, (wait_s, step_s, reason, short_mw) in enumerate(events):
        before_mw = controller.limit_mw
        controller.observe(Observation(index, wait_s, step_s))
        decided = controller.watch({"a": reading(before_mw, *filter(None, [reason]))})
        if decided is None:
            decided = controller.decide()
        if decided is not None:
            assert decided - before_mw <= 0.1 * NOMINAL_MW
            controller.applied(decided - short_mw)
            ceiling_mw = min(ceiling_mw, max(NOMINAL_MW, controller.ceiling_mw))
        assert NOMINAL_MW <= controller.limit_mw <= ceiling_mw
        assert 0 <= controller.remaining_gap() < 1
