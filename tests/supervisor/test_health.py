"""The report of a node, on the imagined NVML and without a driver."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode

from megatron_ntp.launchers.nodes import Node
from megatron_ntp.supervisor.health import NodeWatch

if shutil.which("gcc") is None:
    pytest.skip("needs gcc, to build libnvidia-ml.so.1", allow_module_level=True)

Make = Callable[..., NodeWatch]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNode:
    found = FakeNode.create(tmp_path, num_gpus=4)
    for name in ("FAKE_NVML_STATE", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, found.env()[name])
    return found


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[NodeWatch] = []

    def watch(mask: str | None = None, **fields: Any) -> NodeWatch:
        environ = {"SLURMD_NODENAME": "n1"} | (
            {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
        )
        made.append(NodeWatch(4, environ, kernel_log=None, deadline_s=2.0, **fields))
        return made[-1]

    yield watch
    for one in made:
        one.close()


def devices(report: Node) -> list[str | None]:
    return [slot.device for slot in report.slots]


def test_gpus_go_by_uuid(node: FakeNode, make: Make) -> None:
    report = make().report()
    assert report.host == "n1" and devices(report) == list(node.uuids)


@pytest.mark.parametrize("mask", [None, "0,1,2,3"], ids=["all", "as Slurm has it"])
def test_a_gpu_that_falls_off_the_bus_keeps_its_slot(
    mask: str | None, node: FakeNode, make: Make
) -> None:
    """The driver then numbers those behind it anew."""
    watch = make(mask)
    uuids = list(node.uuids)
    watch.report()
    node.gpu(1).present = 0
    report = watch.report()
    assert devices(report) == [uuids[0], None, uuids[2], uuids[3]]
    assert "not-present" in report.slots[1].reason
    node.gpu(1).present = 1
    assert devices(watch.report()) == uuids, "and has it again when it is back"


def test_a_gpu_that_hangs_is_dead_and_the_others_are_not(node: FakeNode, make: Make) -> None:
    watch = make()
    uuids = list(node.uuids)
    assert watch.report().num_dead == 0
    node.add_rule("nvmlDeviceGetTotalEccErrors", gpu=2, hang_ms=600_000)
    started = time.monotonic()
    report = watch.report()
    assert time.monotonic() - started < 30
    assert devices(report) == [*uuids[:2], None, uuids[3]] and "hangs" in report.slots[2].reason


def test_only_dead_gpus_are_left_out(node: FakeNode, make: Make) -> None:
    node.gpu(0).remap_pending = 1
    node.gpu(3).remap_failure = 1
    report = make().report()
    assert devices(report) == [*node.uuids[:3], None]
    assert report.slots[3].reason == "row-remap-failure"


def test_a_driver_that_has_lost_all_gpus(node: FakeNode, make: Make) -> None:
    for index in range(4):
        node.gpu(index).present = 0
    report = make().report()
    assert report.num_dead == 4 and report.slots[0].reason == "not visible: 0 of 4 GPUs are"


def test_a_driver_that_hangs_is_a_report(node: FakeNode, make: Make) -> None:
    """Not the end of the node's supervisor, also where a slice has to be looked for."""
    watch = make("MIG-1,0")
    watch.report()
    node.add_rule("nvmlDeviceGetCount_v2", hang_ms=600_000)
    report = watch.report()
    assert report.num_dead == 4 and "no answer in time" in report.slots[0].reason, report


def test_a_mask_says_which_gpus_are_the_jobs(node: FakeNode, make: Make) -> None:
    uuids = list(node.uuids)
    report = make(f"2,{uuids[0][:12]},9").report()
    assert devices(report) == [uuids[2], uuids[0], None, None]
    assert [slot.reason for slot in report.slots[2:]] == [
        "the driver knows no such GPU",
        "not visible: 3 of 4 GPUs are",
    ]


def test_a_number_says_nothing_where_boards_differ(node: FakeNode, make: Make) -> None:
    """CUDA counts the fastest first, NVML by place."""
    node.gpu(0)._name = b"Slow board"
    uuids = list(node.uuids)
    report = make(f"1,{uuids[2]}").report()
    assert devices(report)[:2] == [None, uuids[2]]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in report.slots[0].reason


def test_a_driver_that_is_late_once_stops_no_ranks(node: FakeNode, make: Make) -> None:
    watch = make()
    watch.deadline_s = 1.0
    watch.report()
    used = list(node.uuids[:2])
    for function in ("nvmlDeviceGetCount_v2", "nvmlDeviceGetName"):
        node.add_rule(function, gpu=-1, hang_ms=600_000, times=1)
        assert watch.bad_among(used) == {}, function
        assert watch.bad_among(used) == {}
    node.add_rule("nvmlDeviceGetTotalEccErrors", gpu=1, hang_ms=600_000)
    assert watch.bad_among(used) == {}
    (bad,) = watch.bad_among(used).items()
    assert bad[0] == used[1]
    assert "hangs" in bad[1]


def test_the_fault_file_knows_a_gpu_by_number_and_by_uuid(
    node: FakeNode, make: Make, tmp_path: Path
) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text(f"n1 1 XID 79\nn2 0 elsewhere\nn1 {node.uuids[3][:12]} fan\n")
    watch = make(faults=faults, command="echo 0 hot")
    report = watch.report()
    assert devices(report) == [None, None, node.uuids[2], None]
    assert [slot.reason for slot in report.slots] == ["hot", "XID 79", "", "fan"]


def test_what_turns_bad_while_ranks_run(node: FakeNode, make: Make, tmp_path: Path) -> None:
    faults = tmp_path / "faults.txt"
    watch = make(faults=faults)
    watch.report()
    used = list(node.uuids[:3])
    assert watch.bad_among(used) == {}
    node.gpu(3).lost = 1
    node.gpu(2).remap_pending = 1
    assert watch.bad_among(used) == {}, "not used; or not dead"
    node.gpu(1).raise_xid(79)
    assert watch.bad_among(used) == {used[1]: "xid-79"}
    faults.write_text("n1 0 pulled\n")
    assert watch.bad_among(used) == {used[0]: "pulled", used[1]: "xid-79"}


def test_a_fault_file_that_cannot_be_understood(node: FakeNode, make: Make, tmp_path: Path) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("n1\n")
    report = make(faults=faults).report()
    assert report.num_dead == 4 and "is not HOST DEVICE [reason]" in report.slots[0].reason
    faults.write_bytes(b"n2\nn1.site 1 d\xe9faut\nn10 2 other\n")
    reasons = [slot.reason for slot in make(faults=faults).report().slots]
    assert reasons == ["", "d\N{REPLACEMENT CHARACTER}faut", "", ""]


def test_without_a_driver_slots_are_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a driver")
    assert devices(make().report()) == ["0", "1", "2", "3"]
    watch = make("4,7")
    assert devices(watch.report()) == ["4", "7", None, None]
    assert watch.bad_among(["4", "7"]) == {}
