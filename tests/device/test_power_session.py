"""What a training process sees: faults, warnings, costs, and the loop over real processes."""

from __future__ import annotations

import logging
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode, SetPrivilege
from power_kit import site_file

from megatron_ntp.device import session as session_module
from megatron_ntp.device.budget import DomainShape
from megatron_ntp.device.controller import BoostState
from megatron_ntp.device.errors import PowerRequiredError
from megatron_ntp.device.model import ModelFile
from megatron_ntp.device.session import PowerSession, PowerStatus
from megatron_ntp.device.settings import PowerSettings

ROOT = Path(__file__).parents[2]
SHAPE = DomainShape("r0", 8, 7)
ROOMY = """
gpu: {nominal_w: 525, max_w: 700}
domain: {num_gpus: 8, budget_w: 5600}
"""


@pytest.fixture
def job_node(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    """A node as this process's children see it, with GPUs at 75 % of their maximum."""
    for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, node.env()[name])
    monkeypatch.setattr(session_module, "WATCH_EVERY_S", 0.02)
    node.set_limits_w(525)
    return node


@pytest.fixture
def base(tmp_path: Path) -> PowerSettings:
    return PowerSettings(
        ntp_power="boost",
        ntp_power_site=str(site_file(tmp_path, ROOMY)),
        ntp_power_state_dir=str(tmp_path / "state"),
        ntp_power_deadline=60.0,  # other work may slow this machine down
    )


@pytest.fixture(autouse=True)
def no_helper_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session_module, "DEFAULT_SOCKET", tmp_path / "no-helper")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """Filled when the session is over; a list that grows."""
    found: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    handler = Collect()
    logging.getLogger("megatron_ntp").addHandler(handler)
    yield found
    logging.getLogger("megatron_ntp").removeHandler(handler)


class Job:
    """A reduced replica of 8 whose pace follows its boards' clocks, beside healthy ones."""

    def __init__(
        self, node: FakeNode, session: PowerSession, degree: int = 7, healthy_w: float = 525
    ) -> None:
        self.node, self.session, self.degree = node, session, degree
        self.healthy_s = 1 / (healthy_w / 700) ** node.gpu(0).exponent
        self.step, self.gaps = 0, list[float]()

    def timings(self) -> tuple[float, float]:
        slowest = min(self.node.gpu(index).pace() for index in range(self.degree))
        own_s = 8 / self.degree / slowest
        return own_s - self.healthy_s, max(own_s, self.healthy_s)

    def run(self, steps: int) -> None:
        """Each step is taken in before the next, as where steps last seconds."""
        for _ in range(steps):
            wait_s, step_s = self.timings()
            self.gaps.append(wait_s / step_s)
            limit_w = self.node.gpu(0).requested_w
            print(f"step {self.step}: {limit_w:g} W, gap {100 * wait_s / step_s:.1f} %")
            self.session.observe(self.step, wait_s, step_s)
            self.step += 1
            give_up_at = time.monotonic() + 30
            while self.session.is_busy() and time.monotonic() < give_up_at:
                time.sleep(0.001)


def wait_status(session: PowerSession, *states: BoostState) -> PowerStatus:
    give_up_at = time.monotonic() + 60
    while session.status().state not in states and time.monotonic() < give_up_at:
        time.sleep(0.005)
    return session.status()


# ---- the loop, closed ----


def test_8_to_7_with_room_is_within_1_percent_after_20_steps(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    with PowerSession(base) as session:
        status = session.start(job_node.uuids[:7], SHAPE)
        assert (status.nominal_mw, status.ceiling_mw) == (525_000, 700_000)
        job = Job(job_node, session)
        job.run(20)
        assert all(abs(gap) <= 0.01 for gap in job.gaps[15:]), job.gaps
        assert session.status().state is BoostState.HOLDING and session.remaining_gap() == 0.0
    assert job_node.limits_w() == [525.0] * 8 and warnings == []
    writes = job_node.writes()
    assert max(write.sum_requested_mw for write in writes) <= 5_600_000
    assert max(write.value for write in writes) <= 700_000
    assert {write.uuid for write in writes} == set(job_node.uuids[:7])


def test_default_budget_stops_at_8_sevenths_and_reports_the_rest(
    job_node: FakeNode, base: PowerSettings
) -> None:
    settings = replace(base, ntp_power_site=None, ntp_power_nominal=525.0)
    with PowerSession(settings) as session:
        status = session.start(job_node.uuids[:7], SHAPE)
        assert status.ceiling_mw == 600_000 and status.bound_by == "domain budget"
        expected = 1 - 7 / 8 * (8 / 7) ** 0.5
        assert session.remaining_gap() == pytest.approx(expected, abs=0.001)
        Job(job_node, session).run(20)
        assert session.status().state is BoostState.AT_CEILING
        assert session.remaining_gap() == pytest.approx(expected, abs=0.001)
        assert job_node.limits_w()[:7] == [600.0] * 7
    budget_mw = 8 * 525_000
    assert all(write.sum_requested_mw - 525_000 <= budget_mw for write in job_node.writes())


def test_8_to_5_ends_at_the_ceiling(job_node: FakeNode, base: PowerSettings) -> None:
    with PowerSession(base) as session:
        session.start(job_node.uuids[:5], DomainShape("r0", 8, 5))
        Job(job_node, session, degree=5).run(20)
        assert session.status().state is BoostState.AT_CEILING
        assert job_node.limits_w()[:5] == [700.0] * 5
        assert session.remaining_gap() == pytest.approx(1 - 5 / 8 * (4 / 3) ** 0.5, abs=0.001)


def test_heat_backs_off(job_node: FakeNode, base: PowerSettings) -> None:
    with PowerSession(base) as session:
        session.start(job_node.uuids[:7], SHAPE)
        job = Job(job_node, session)
        job.run(20)
        before_w = job_node.limits_w()[0]
        gpu = job_node.gpu(3)
        gpu.c_per_w = 0.1  # its fan fails: 98 degrees at this draw
        job_node.advance(1000)
        assert wait_status(session, BoostState.SLOWED).state is BoostState.SLOWED
        assert job_node.limits_w()[0] < before_w
        assert session.status().limit_mw >= 525_000


def test_healthy_domain_runs_at_nominal_and_is_given_back(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    job_node.set_limits_w(700)
    with PowerSession(base) as session:
        session.start(job_node.uuids, DomainShape("r0", 8, 8))
        assert job_node.limits_w() == [525.0] * 8
        for step in range(10):
            session.observe(step, 0.5, 1.0)
        time.sleep(0.1)
        assert job_node.limits_w() == [525.0] * 8 and session.remaining_gap() == 0.0
    assert job_node.limits_w() == [700.0] * 8 and warnings == []


def test_no_headroom_is_said_once_and_writes_nothing(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    job_node.set_limits_w(700)
    settings = replace(base, ntp_power_site=None)
    with PowerSession(settings) as session:
        status = session.start(job_node.uuids[:7], SHAPE)
        assert status.state is BoostState.NO_HEADROOM
        Job(job_node, session, healthy_w=700).run(10)
        assert session.remaining_gap() == pytest.approx(0.125)
    assert len(warnings) == 1 and "no headroom" in warnings[0] and "12.5 %" in warnings[0]
    assert job_node.writes() == []


def test_curve_is_measured_and_used_by_the_next_job(
    job_node: FakeNode, base: PowerSettings, tmp_path: Path
) -> None:
    for index in range(8):
        job_node.gpu(index).exponent = 0.7
    settings = replace(base, ntp_power_model=str(tmp_path / "curves.json"))
    with PowerSession(settings) as session:
        session.start(job_node.uuids[:7], SHAPE)
        Job(job_node, session).run(20)
    curve = ModelFile.load(tmp_path / "curves.json").curve("Imagined H100")
    assert curve.exponent == pytest.approx(0.7, abs=0.02)
    with PowerSession(replace(settings, ntp_power_site=None)) as session:
        session.start(job_node.uuids[:7], SHAPE)
        expected = 1 - 7 / 8 * (600 / 525) ** curve.exponent
        assert session.remaining_gap() == pytest.approx(expected, abs=0.001)


def test_damaged_model_file_costs_one_warning(
    job_node: FakeNode, base: PowerSettings, tmp_path: Path, warnings: list[str]
) -> None:
    path = tmp_path / "curves.json"
    path.write_text("{")
    with PowerSession(replace(base, ntp_power_model=str(path))) as session:
        session.start(job_node.uuids[:7], SHAPE)
        Job(job_node, session).run(10)
    assert len(warnings) == 1 and "curves.json is damaged" in warnings[0]
    assert path.read_text() == "{"


# ---- faults: training goes on with one warning; require stops before training ----


def no_permission(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    node.state.set_privilege = SetPrivilege.NOBODY
    return {}


def not_supported(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    node.gpu(3).supports_limits = 0
    return {}


def lost(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    node.gpu(3).lost = 1
    return {}


def library_absent(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("FAKE_NVML_STATE", "/nonexistent")
    if not Path("/dev/nvidiactl").exists():
        monkeypatch.delenv("LD_LIBRARY_PATH")
    return {}


def outside_range(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"ntp_power_nominal": 150.0}


def hanging_call(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    node.add_rule("nvmlDeviceGetPowerManagementLimit", gpu=2, hang_ms=600_000)
    return {"ntp_power_deadline": 1.0}


def hanging_init(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    node.add_rule("nvmlInitWithFlags", hang_ms=600_000)
    return {"ntp_power_deadline": 1.0}


FAULTS = [
    (no_permission, "no permission"),
    (not_supported, "not supported"),
    (lost, "GPU lost"),
    (library_absent, "NVML missing"),
    (outside_range, "value out of range"),
    (hanging_call, "no answer in time"),
    (hanging_init, "no answer in time"),
]


@pytest.mark.parametrize(("cause", "fault"), FAULTS, ids=[cause.__name__ for cause, _ in FAULTS])
def test_fault_at_start(
    job_node: FakeNode,
    base: PowerSettings,
    monkeypatch: pytest.MonkeyPatch,
    warnings: list[str],
    cause: Any,
    fault: str,
) -> None:
    settings = replace(base, **cause(job_node, monkeypatch))
    with PowerSession(settings) as session:
        status = session.start(job_node.uuids[:7], SHAPE)
        assert status.state is BoostState.OFF and fault in status.message
        for step in range(50):
            session.observe(step, 0.1, 1.0)
        assert session.remaining_gap() == pytest.approx(0.125)
    assert len(warnings) == 1 and fault in warnings[0] and "training goes on" in warnings[0]
    required = PowerSession(replace(settings, ntp_power="require"))
    with pytest.raises(PowerRequiredError, match=f"--ntp-power require: .*{fault}"):
        required.start(job_node.uuids[:7], SHAPE)
    required.close()
    assert set(job_node.limits_w()) == {525.0}


@pytest.mark.parametrize(
    ("code", "fault"), [(4, "no permission"), (15, "GPU lost"), (999, "failed")]
)
def test_fault_under_way(
    job_node: FakeNode, base: PowerSettings, warnings: list[str], code: int, fault: str
) -> None:
    with PowerSession(replace(base, ntp_power="require")) as session:
        session.start(job_node.uuids[:7], SHAPE)
        Job(job_node, session).run(4)
        assert job_node.limits_w()[0] > 525
        job_node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=4, result=code, times=1)
        Job(job_node, session).run(20)
        status = session.status()
        assert status.state is BoostState.OFF and fault in status.message
        assert session.remaining_gap() > 0.01
        assert job_node.limits_w()[:4] == [525.0] * 4, "back at nominal"
    assert len(warnings) == 1 and fault in warnings[0] and "boost ends" in warnings[0]
    assert job_node.limits_w() == [525.0] * 8


def test_hang_under_way(
    job_node: FakeNode, base: PowerSettings, warnings: list[str], tmp_path: Path
) -> None:
    with PowerSession(replace(base, ntp_power_deadline=1.0)) as session:
        session.start(job_node.uuids[:7], SHAPE)
        job_node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=4, hang_ms=600_000)
        job = Job(job_node, session)
        job.run(4)
        started = time.perf_counter()
        for step in range(1000):
            session.observe(step, 0.1, 1.0)
        assert time.perf_counter() - started < 1.0, "training does not wait for a hung driver"
        assert wait_status(session, BoostState.OFF).state is BoostState.OFF
        assert "no answer in time" in session.status().message
    assert len([text for text in warnings if "boost ends" in text]) == 1
    others = [watts for index, watts in enumerate(job_node.limits_w()) if index != 4]
    assert others == [525.0] * 7


def test_administrators_change_ends_the_boost(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    with PowerSession(base) as session:
        session.start(job_node.uuids[:7], SHAPE)
        Job(job_node, session).run(4)
        job_node.gpu(2).set_limit_w(300)
        Job(job_node, session).run(20)
        assert "somebody else set 300 W" in session.status().message
    assert len(warnings) == 1
    assert job_node.limits_w() == [525, 525, 300, 525, 525, 525, 525, 525]


def test_off_does_nothing_at_all(job_node: FakeNode, tmp_path: Path) -> None:
    with PowerSession(PowerSettings()) as session:
        session.start(job_node.uuids[:7], SHAPE)
        session.observe(0, 0.1, 1.0)
        assert session.remaining_gap() == 0.0
    assert threading.active_count() == 1 or "ntp-power" not in {
        thread.name for thread in threading.enumerate()
    }
    assert job_node.writes() == [] and not (tmp_path / "state").exists()


# ---- ways to a keeper ----


def test_command_that_cannot_start(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    settings = replace(base, ntp_power_command="/no/such/sudo -n megatron-ntp power serve")
    with PowerSession(settings) as session:
        assert "cannot be started" in session.start(job_node.uuids[:7], SHAPE).message
    assert len(warnings) == 1


def test_command_that_is_refused(
    job_node: FakeNode, base: PowerSettings, warnings: list[str]
) -> None:
    """As sudo does that asks for a password."""
    with PowerSession(replace(base, ntp_power_command="false")) as session:
        assert "keeper is gone" in session.start(job_node.uuids[:7], SHAPE).message
    assert len(warnings) == 1


def test_helper_that_is_not_there(
    job_node: FakeNode, base: PowerSettings, tmp_path: Path, warnings: list[str]
) -> None:
    settings = replace(base, ntp_power_socket=str(tmp_path / "none.sock"))
    with PowerSession(settings) as session:
        assert "no power helper answers" in session.start(job_node.uuids[:7], SHAPE).message
    assert len(warnings) == 1


def test_keeper_that_was_stopped_does_not_stop_training(
    job_node: FakeNode, base: PowerSettings, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    from megatron_ntp.device import client

    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 1.0)
    settings = replace(base, ntp_power_command="sleep 20")
    session = PowerSession(settings)
    assert "did not answer within 1 s" in session.start(job_node.uuids[:7], SHAPE).message
    session.close()
    assert len(warnings) == 1


# ---- costs ----


def test_training_thread_makes_no_nvml_call_and_pays_microseconds(
    job_node: FakeNode, base: PowerSettings
) -> None:
    job_node.state.trace = 1
    session = PowerSession(base)
    session.start(job_node.uuids[:7], SHAPE)
    job = Job(job_node, session)
    job.run(20)
    assert session.status().state is BoostState.HOLDING
    costs_s = []
    wait_s, step_s = job.timings()
    for step in range(300):
        started = time.thread_time()
        session.observe(step, wait_s, step_s)
        session.remaining_gap()
        costs_s.append(time.thread_time() - started)
        time.sleep(0.001)
    session.close()
    calls = [event for event in job_node.events() if event["event"] == "call"]
    assert len(calls) > 100
    assert os.getpid() not in {call["pid"] for call in calls}
    print(f"observe and remaining_gap: {1e6 * statistics.median(costs_s):.0f} us of the thread")
    assert statistics.mean(costs_s) < 0.0005 and statistics.median(costs_s) < 0.0001


def test_control_step_costs_less_than_1_ms_of_the_process_when_nothing_changes(
    job_node: FakeNode, base: PowerSettings
) -> None:
    """All threads together: what the loop takes away from training."""
    session = PowerSession(base)
    session.start(job_node.uuids[:7], SHAPE)
    job = Job(job_node, session)
    job.run(20)
    num_writes = len(job_node.writes())
    wait_s, step_s = job.timings()
    steps = 200
    started = time.process_time()
    for step in range(steps):
        session.observe(step, wait_s, step_s)
        while session.is_busy():
            time.sleep(0.0005)
    cost_s = (time.process_time() - started) / steps
    session.close()
    assert len(job_node.writes()) - num_writes == 7, "only the restore wrote"
    print(f"control step: {1e3 * cost_s:.2f} ms of the training process")
    assert cost_s < 0.001, f"{1e3 * cost_s:.3f} ms per control step"
