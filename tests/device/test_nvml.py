"""The device layer: values, one error map, read-back, and a deadline on every call."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fake_nvml import FakeNode, SetPrivilege

from megatron_ntp.device.errors import CURES, DeviceError, Fault
from megatron_ntp.device.nvml import DeviceLayer, PowerScope, XidEvent
from megatron_ntp.device.nvml_process import NvmlProcess, wait_until_settled

SET = "nvmlDeviceSetPowerManagementLimit"


def test_reading_has_everything_that_the_controller_needs(
    node: FakeNode, layer: DeviceLayer
) -> None:
    gpu = node.gpu(1)
    gpu.extra_reasons = 0x80 | 0x40
    gpu.external_cap_mw = 450_000
    reading = layer.reading(node.uuids[1])
    limits = reading.limits
    assert (limits.requested_mw, limits.enforced_mw, limits.default_mw) == (
        500_000,
        450_000,
        700_000,
    )
    assert (limits.min_mw, limits.max_mw) == (200_000, 700_000)
    assert reading.draw_mw == 450_000 and reading.max_clock_mhz == 1980
    assert reading.clock_mhz == int(1980 * (450 / 700) ** 0.5)
    assert reading.energy_mj is not None and reading.energy_mj >= 1_000_000_000
    assert set(reading.reasons) == {"sw_power_cap", "hw_thermal", "hw_power_brake"}


def test_what_a_board_does_not_say_is_none(node: FakeNode, layer: DeviceLayer) -> None:
    node.add_rule("nvmlDeviceGetTotalEnergyConsumption", result=3)
    node.add_rule("nvmlDeviceGetTemperature*", result=3)
    node.add_rule("nvmlDeviceGetCurrentClocksEventReasons", result=13)  # an older driver
    reading = layer.reading(node.uuids[0])
    assert reading.energy_mj is None and reading.temperature_c is None
    assert reading.reasons == ("sw_power_cap",)


def test_set_reads_back_what_is_enforced(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(4).external_cap_mw = 600_000
    limits = layer.set_limit(node.uuids[4], 650_000)
    assert (limits.requested_mw, limits.enforced_mw) == (650_000, 600_000)
    assert node.limits_w() == [500, 500, 500, 500, 650, 500, 500, 500]


@pytest.mark.parametrize("limit_mw", [0, 199_999, 700_001, 4_000_000_000])
def test_value_outside_the_boards_range_is_never_written(
    node: FakeNode, layer: DeviceLayer, limit_mw: int
) -> None:
    with pytest.raises(DeviceError, match="200 W to 700 W") as caught:
        layer.set_limit(node.uuids[0], limit_mw)
    assert caught.value.fault is Fault.OUT_OF_RANGE
    assert node.writes() == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (2, Fault.OUT_OF_RANGE),
        (3, Fault.NOT_SUPPORTED),
        (4, Fault.NO_PERMISSION),
        (6, Fault.NOT_FOUND),
        (8, Fault.INSUFFICIENT_POWER),
        (9, Fault.LIBRARY_MISSING),
        (10, Fault.TIMEOUT),
        (13, Fault.NOT_SUPPORTED),
        (15, Fault.LOST),
        (16, Fault.LOST),
        (17, Fault.NO_PERMISSION),
        (18, Fault.LIBRARY_MISSING),
        (28, Fault.NOT_FOUND),
        (999, Fault.FAILED),
    ],
)
def test_error_map(node: FakeNode, layer: DeviceLayer, code: int, fault: Fault) -> None:
    node.add_rule(SET, result=code)
    with pytest.raises(DeviceError) as caught:
        layer.set_limit(node.uuids[3], 510_000)
    assert caught.value.fault is fault
    text = str(caught.value)
    assert node.uuids[3] in text and "510 W" in text and CURES[fault] in text


def test_gpu_without_limits_is_not_supported(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(0).supports_limits = 0
    with pytest.raises(DeviceError) as caught:
        layer.limits(node.uuids[0])
    assert caught.value.fault is Fault.NOT_SUPPORTED


def test_uid_0_is_no_proof_of_permission(node: FakeNode, layer: DeviceLayer) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, as in a container")
    node.state.set_privilege = SetPrivilege.NOBODY
    with pytest.raises(DeviceError) as caught:
        layer.set_limit(node.uuids[0], 510_000)
    assert caught.value.fault is Fault.NO_PERMISSION


def test_module_scope_is_left_alone_unless_asked_for(node: FakeNode, layer: DeviceLayer) -> None:
    gpu = node.gpu(0)
    gpu.supports_module = 1
    layer.set_limit(gpu.uuid, 600_000)
    assert gpu.module_limit.requested_mw == 1_000_000
    limits = layer.set_limit(gpu.uuid, 900_000, PowerScope.MODULE)
    assert limits.requested_mw == gpu.module_limit.requested_mw == 900_000
    assert gpu.gpu_limit.requested_mw == 600_000
    assert [write.function for write in node.writes()] == [SET, SET + "_v2"]


def test_refusal_of_a_module_limit_is_seen(node: FakeNode, layer: DeviceLayer) -> None:
    """nvidia-ml-py's own wrapper of this call drops the return code."""
    node.gpu(0).supports_module = 1
    node.state.set_privilege = SetPrivilege.NOBODY
    with pytest.raises(DeviceError) as caught:
        layer.set_limit(node.uuids[0], 900_000, PowerScope.MODULE)
    assert caught.value.fault is Fault.NO_PERMISSION


def test_board_without_module_scope_says_so(node: FakeNode, layer: DeviceLayer) -> None:
    with pytest.raises(DeviceError) as caught:
        layer.limits(node.uuids[0], PowerScope.MODULE)
    assert caught.value.fault is Fault.NOT_SUPPORTED


def test_clocks_are_locked_and_reset_where_allowed(node: FakeNode, layer: DeviceLayer) -> None:
    gpu = node.gpu(2)
    layer.lock_clocks(gpu.uuid, 1000, 1500)
    assert (gpu.locked_min_mhz, gpu.locked_max_mhz) == (1000, 1500)
    assert layer.reading(gpu.uuid).clock_mhz == 1500
    layer.reset_clocks(gpu.uuid)
    assert gpu.locked_max_mhz == 0
    node.state.set_privilege = SetPrivilege.NOBODY
    with pytest.raises(DeviceError) as caught:
        layer.lock_clocks(gpu.uuid, 1000, 1500)
    assert caught.value.fault is Fault.NO_PERMISSION


def test_gpus_are_found_by_uuid_when_indices_shift(node: FakeNode, layer: DeviceLayer) -> None:
    uuid = node.uuids[3]
    layer.count()
    node.gpu(1).present = 0  # GPU 3 is index 2 from now on
    layer.set_limit(uuid, 600_000)
    assert node.gpu(3).requested_w == 600 and layer.identity(2).uuid == uuid


def test_xids_come_in_from_the_moment_of_watching(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(1).raise_xid(13)
    layer.watch_xids(tuple(node.uuids))
    assert layer.xids() == ()
    node.gpu(1).raise_xid(79)
    node.gpu(5).raise_xid(48)
    assert set(layer.xids()) == {XidEvent(node.uuids[1], 79), XidEvent(node.uuids[5], 48)}
    assert layer.xids() == ()


# ---- the process around it ----


def test_process_answers_what_the_library_answers(
    node: FakeNode, layer: DeviceLayer, process_layer: NvmlProcess
) -> None:
    uuid = node.uuids[2]
    node.state.virtual_now_s = 10
    node.gpu(2).set_processes(41, 42)
    assert process_layer.count() == layer.count()
    assert process_layer.identity(2) == layer.identity(2)
    assert process_layer.reading(uuid) == layer.reading(uuid)
    assert process_layer.health(uuid) == layer.health(uuid)
    assert process_layer.pids(uuid) == layer.pids(uuid) == (41, 42)
    assert process_layer.set_limit(uuid, 550_000) == layer.limits(uuid)
    process_layer.lock_clocks(uuid, 900, 1200)
    assert node.gpu(2).locked_max_mhz == 1200
    process_layer.reset_clocks(uuid)
    process_layer.watch_xids((uuid,))
    node.gpu(2).raise_xid(94)
    assert process_layer.xids() == (XidEvent(uuid, 94),)
    with pytest.raises(DeviceError) as caught:
        process_layer.limits(uuid.replace("0", "f"))
    assert caught.value.fault is Fault.NOT_FOUND


def test_hanging_call_costs_its_deadline_and_the_others_go_on(
    node: FakeNode, process_layer: NvmlProcess
) -> None:
    process_layer.count()
    node.add_rule("nvmlDeviceGetHandleByUUID", hang_ms=60_000, times=1)
    started = time.monotonic()
    with pytest.raises(DeviceError, match="within 1 s") as caught:
        process_layer.limits(node.uuids[0])
    assert caught.value.fault is Fault.TIMEOUT
    assert time.monotonic() - started < 5
    assert process_layer.limits(node.uuids[1]).requested_mw == 500_000
    assert wait_until_settled(process_layer, 5)


def test_hanging_init_is_a_timeout_too(node: FakeNode, process_layer: NvmlProcess) -> None:
    node.add_rule("nvmlInitWithFlags", hang_ms=60_000)
    with pytest.raises(DeviceError) as caught:
        process_layer.count()
    assert caught.value.fault is Fault.TIMEOUT


def test_process_that_dies_is_replaced(node: FakeNode, process_layer: NvmlProcess) -> None:
    process_layer.count()
    assert process_layer._process is not None
    process_layer._process.kill()
    process_layer._process.wait()
    with pytest.raises(DeviceError) as caught:
        process_layer.count()
    assert caught.value.fault is Fault.FAILED
    assert process_layer.count() == 8


def test_process_goes_when_its_caller_closes(node: FakeNode, process_layer: NvmlProcess) -> None:
    process_layer.count()
    process = process_layer._process
    assert process is not None
    process_layer.close()
    assert process.wait(10) == 0


def test_library_absent(
    process_layer: NvmlProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver, so its library is found")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match=r"libnvidia-ml\.so\.1") as caught:
        process_layer.count()
    assert caught.value.fault is Fault.LIBRARY_MISSING


def test_driver_not_loaded(
    node: FakeNode, process_layer: NvmlProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NVML_STATE", "/nonexistent")
    with pytest.raises(DeviceError) as caught:
        process_layer.count()
    assert caught.value.fault is Fault.LIBRARY_MISSING


def test_held_descriptor_lives_as_long_as_a_process_that_may_still_write(
    node: FakeNode, process_layer: NvmlProcess
) -> None:
    process_layer.count()
    read_fd, write_fd = os.pipe()
    process_layer.hold(write_fd)
    os.set_blocking(read_fd, False)
    node.add_rule(SET, hang_ms=60_000, times=1)
    with pytest.raises(DeviceError):
        process_layer.set_limit(node.uuids[0], 600_000)
    process_layer.limits(node.uuids[0])  # another process now, which was given the pipe as well
    os.close(write_fd)
    with pytest.raises(BlockingIOError):
        os.read(read_fd, 1)  # somebody still holds the other end
    process_layer.close()
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        try:
            assert os.read(read_fd, 1) == b""
            break
        except BlockingIOError:
            time.sleep(0.01)
    else:
        pytest.fail("the process that held the pipe did not go")
    os.close(read_fd)
