"""The imagined node answers like a driver, to several processes at once."""

from __future__ import annotations

import subprocess
import sys

from fake_nvml import FakeNode, SetPrivilege

READ_ALL = """
import pynvml as nvml
nvml.nvmlInit()
for index in range(nvml.nvmlDeviceGetCount()):
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    print(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetPowerManagementLimit(handle))
"""

SET_MANY = """
import sys
import pynvml as nvml
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
for limit_mw in range(300_000, 300_200):
    nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
"""


def run(node: FakeNode, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=node.env(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_nvidia_ml_py_of_another_process_sees_the_node(node: FakeNode) -> None:
    node.gpu(2).set_limit_w(640)
    lines = run(node, READ_ALL).stdout.splitlines()
    assert lines == [
        f"{uuid} {640_000 if index == 2 else 500_000}" for index, uuid in enumerate(node.uuids)
    ]


def test_writes_of_two_processes_are_all_logged_in_order(node: FakeNode) -> None:
    commands = [[sys.executable, "-c", SET_MANY, uuid] for uuid in node.uuids[:2]]
    processes = [subprocess.Popen(command, env=node.env()) for command in commands]
    assert [process.wait() for process in processes] == [0, 0]
    writes = node.writes()
    assert len(writes) == 400
    assert [w.time_ns for w in writes] == sorted(w.time_ns for w in writes)
    for uuid in node.uuids[:2]:
        assert [w.value for w in writes if w.uuid == uuid] == list(range(300_000, 300_200))


def test_driver_decides_who_may_write(node: FakeNode) -> None:
    node.state.set_privilege = SetPrivilege.NOBODY
    result = run(node, SET_MANY, node.uuids[0])
    assert "Insufficient Permissions" in result.stderr
    assert node.limits_w() == [500.0] * 8


def test_lost_gpu_keeps_its_place_and_answers_nothing(node: FakeNode) -> None:
    node.gpu(0).lost = 1
    assert "GPU is lost" in run(node, READ_ALL).stderr


def test_board_heats_up_slows_down_and_cools(node: FakeNode) -> None:
    code = """
import sys, pynvml as nvml
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByIndex(0)
print(nvml.nvmlDeviceGetTemperature(handle, 0), nvml.nvmlDeviceGetClockInfo(handle, 1),
      nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & 0x20)
"""
    gpu = node.gpu(0)
    gpu.c_per_w = 0.12  # 90 degrees at 500 W

    def state() -> list[int]:
        return [int(word) for word in run(node, code).stdout.split()]

    node.advance(1)
    cool = state()
    node.advance(100)
    hot = state()
    gpu.set_limit_w(300)
    node.advance(100)
    cooled = state()
    assert cool[2] == 0 and hot[0] >= 87 and hot[2] == 0x20 and hot[1] < 0.81 * cool[1]
    assert cooled[0] < 70 and cooled[2] == 0
