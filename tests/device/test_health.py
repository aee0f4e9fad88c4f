"""Verdicts on GPUs: each condition, hangs, XIDs, the site's hook, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import FakeGpu, FakeNode

from megatron_ntp.device import xids
from megatron_ntp.device.health import (
    GpuHealth,
    HealthOptions,
    HealthWatch,
    Verdict,
    check_node,
)
from megatron_ntp.device.nvml import DeviceLayer
from megatron_ntp.device.nvml_process import NvmlProcess

ROOT = Path(__file__).parents[2]
NO_LOG = HealthOptions(kernel_log=None)
MAIN = "import sys; from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"


def one(layer: DeviceLayer, index: int, options: HealthOptions = NO_LOG) -> GpuHealth:
    return check_node(layer, options).gpus[index]


def reasons(gpu: GpuHealth) -> list[str]:
    return [finding.reason for finding in gpu.findings]


def test_healthy_node(node: FakeNode, layer: DeviceLayer) -> None:
    found = check_node(layer, NO_LOG)
    assert found.verdict is Verdict.OK and found.uuids(Verdict.OK) == tuple(node.uuids)
    assert found.gpus[3].pci_bus_id == "00000000:13:00.0"


@pytest.mark.parametrize(
    ("spoil", "reason", "verdict"),
    [
        (lambda gpu: setattr(gpu, "ecc_uncorrected", 2), "ecc-uncorrectable", Verdict.SUSPECT),
        (lambda gpu: setattr(gpu, "remap_failure", 1), "row-remap-failure", Verdict.DEAD),
        (lambda gpu: setattr(gpu, "remap_pending", 1), "row-remap-pending", Verdict.SUSPECT),
        (lambda gpu: gpu.link_active.__setitem__(4, 0), "nvlink-down", Verdict.SUSPECT),
        (lambda gpu: setattr(gpu, "extra_reasons", 0x40), "slowed", Verdict.SUSPECT),
        (lambda gpu: setattr(gpu, "extra_reasons", 0x80), "slowed", Verdict.SUSPECT),
        (lambda gpu: setattr(gpu, "recovery_action", 1), "needs-reset", Verdict.DEAD),
        (lambda gpu: setattr(gpu, "recovery_action", 2), "needs-reset", Verdict.DEAD),
        (lambda gpu: setattr(gpu, "recovery_action", 3), "needs-reset", Verdict.SUSPECT),
        (lambda gpu: setattr(gpu, "recovery_action", 9), "needs-reset", Verdict.DEAD),
    ],
)
def test_conditions(
    node: FakeNode,
    layer: DeviceLayer,
    spoil: Callable[[FakeGpu], None],
    reason: str,
    verdict: Verdict,
) -> None:
    spoil(node.gpu(3))
    found = check_node(layer, NO_LOG)
    assert reasons(found.gpus[3]) == [reason] and found.gpus[3].verdict is verdict
    assert found.verdict is verdict and found.uuids(verdict) == (node.uuids[3],)


def test_power_cap_and_corrected_errors_are_healthy(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(3).ecc_corrected = 1000
    node.gpu(3).remap_corrected = 3
    assert one(layer, 3).findings == ()


def test_board_without_nvlink_ecc_or_remapping_is_healthy(
    node: FakeNode, layer: DeviceLayer
) -> None:
    node.gpu(3).num_links = 0
    for name in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows"):
        node.add_rule(name, gpu=3, result=3)
    node.add_rule("nvmlDeviceGetFieldValues", gpu=3, result=13)
    assert one(layer, 3).findings == ()


def test_lost_and_missing_gpus(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(3).lost = 1
    node.gpu(5).present = 0
    found = check_node(layer, HealthOptions(tuple(node.uuids), kernel_log=None))
    by_uuid = {gpu.uuid: gpu for gpu in found.gpus}
    assert by_uuid[None].index == 3 and reasons(by_uuid[None]) == ["lost"]
    for index in (3, 5):
        assert reasons(by_uuid[node.uuids[index]]) == ["not-present"]
    assert found.uuids(Verdict.DEAD) == (node.uuids[3], node.uuids[5])
    assert len(found.uuids(Verdict.OK)) == 6


def test_a_gpu_without_a_name_is_dead_whatever_its_fault(
    node: FakeNode, layer: DeviceLayer
) -> None:
    """NVML often answers for a dead GPU with its "unknown error"."""
    node.add_rule("nvmlDeviceGetUUID", gpu=3, result=999)
    gpu = one(layer, 3)
    assert (gpu.uuid, reasons(gpu), gpu.verdict) == (None, ["unreadable"], Verdict.DEAD)


def test_what_may_not_be_read_hides_nothing_else(node: FakeNode, layer: DeviceLayer) -> None:
    """As where MIG is on: processes of the board are for root."""
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetNvLinkState"):
        node.add_rule(name, gpu=3, result=4)
    node.gpu(3).remap_failure = 1
    assert reasons(one(layer, 3)) == ["row-remap-failure"]


def test_processes_matter_only_between_attempts(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(2).set_processes(41, 42)
    assert one(layer, 2).verdict is Verdict.OK and one(layer, 2).pids == (41, 42)
    idle = HealthOptions(expect_idle=True, allowed_pids=frozenset({41}), kernel_log=None)
    assert [str(finding) for finding in one(layer, 2, idle).findings] == ["process-left (pid 42)"]


@pytest.mark.parametrize("function", ["nvmlDeviceGetName", "nvmlDeviceGetTotalEccErrors"])
def test_hanging_gpu_is_dead_and_the_others_are_still_judged(
    node: FakeNode, process_layer: NvmlProcess, function: str
) -> None:
    node.add_rule(function, gpu=3, hang_ms=600_000)
    node.gpu(6).remap_pending = 1
    started = time.monotonic()
    found = check_node(process_layer, HealthOptions(tuple(node.uuids), kernel_log=None))
    assert time.monotonic() - started < 30
    assert reasons(found.gpus[3]) == ["hangs"] and found.gpus[3].verdict is Verdict.DEAD
    assert found.gpus[6].verdict is Verdict.SUSPECT
    assert len(found.uuids(Verdict.OK)) == 6
    assert found.uuids(Verdict.DEAD) == (node.uuids[3],)


def test_hanging_driver_is_said_of_the_node(node: FakeNode, process_layer: NvmlProcess) -> None:
    node.add_rule("nvmlInitWithFlags", hang_ms=600_000)
    found = check_node(process_layer, NO_LOG)
    assert [finding.reason for finding in found.findings] == ["driver"]
    assert found.verdict is Verdict.DEAD and found.gpus == ()


# ---- XIDs ----


def test_xids_heard_while_watching(node: FakeNode, layer: DeviceLayer) -> None:
    watch = HealthWatch(layer, NO_LOG)
    assert watch.poll().verdict is Verdict.OK
    node.gpu(1).raise_xid(79)
    node.gpu(2).raise_xid(63)
    node.gpu(4).raise_xid(31)  # a program's illegal access
    found = watch.poll()
    assert reasons(found.gpus[1]) == ["xid-79"] and found.gpus[1].verdict is Verdict.DEAD
    assert reasons(found.gpus[2]) == ["xid-63"] and found.gpus[2].verdict is Verdict.SUSPECT
    assert found.gpus[4].verdict is Verdict.OK
    assert watch.poll().gpus[1].verdict is Verdict.DEAD, "it is not forgotten"


def test_watch_goes_on_listening_after_a_hang(node: FakeNode, process_layer: NvmlProcess) -> None:
    watch = HealthWatch(process_layer, NO_LOG)
    watch.poll()
    node.add_rule("nvmlDeviceGetTotalEccErrors", gpu=3, hang_ms=600_000, times=1)
    assert watch.poll().gpus[3].verdict is Verdict.DEAD
    assert watch.poll().gpus[3].verdict is Verdict.OK
    node.gpu(5).raise_xid(79)
    assert watch.poll().gpus[5].verdict is Verdict.DEAD


def test_watch_goes_on_listening_after_the_driver_hung(
    node: FakeNode, process_layer: NvmlProcess
) -> None:
    watch = HealthWatch(process_layer, NO_LOG)
    watch.poll()
    node.add_rule("nvmlDeviceGetCount_v2", hang_ms=600_000, times=1)
    assert [finding.reason for finding in watch.poll().findings] == ["driver"]
    assert watch.poll().verdict is Verdict.OK
    node.gpu(5).raise_xid(79)
    assert watch.poll().gpus[5].verdict is Verdict.DEAD


def test_a_board_without_events_costs_the_others_none(node: FakeNode, layer: DeviceLayer) -> None:
    node.add_rule("nvmlDeviceRegisterEvents", gpu=2, result=3)
    watch = HealthWatch(layer, NO_LOG)
    watch.poll()
    node.gpu(5).raise_xid(79)
    assert watch.poll().gpus[5].verdict is Verdict.DEAD


def write_log(path: Path, *lines: tuple[float, str]) -> Path:
    now_us = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
    path.write_text(
        "".join(
            f"4,{number},{int(now_us - age_s * 1e6)},-;{text}\n"
            for number, (age_s, text) in enumerate(lines)
        )
    )
    return path


def test_xids_of_the_kernel_log(node: FakeNode, layer: DeviceLayer, tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "kmsg",
        (16, "usb 1-1: new device"),
        (14, "NVRM: Xid (PCI:0000:13:00): 79, pid='<unknown>', GPU has fallen off the bus."),
        (12, "NVRM: Xid (PCI:0000:11:00): 13, pid=77, Graphics SM Warp Exception"),
        (10, "NVRM: Xid (PCI:0000:12:00): 94, pid=77, Contained ECC error"),
        (40, "NVRM: Xid (PCI:0000:14:00): 79, an earlier life"),
    )
    # Seconds and not hours, since stamps count from the boot and this machine may be fresh.
    found = check_node(layer, HealthOptions(kernel_log=log, xids_since_s=30))
    assert reasons(found.gpus[3]) == ["xid-79"] and found.gpus[3].verdict is Verdict.DEAD
    assert reasons(found.gpus[2]) == ["xid-94"] and found.gpus[2].verdict is Verdict.SUSPECT
    assert found.gpus[1].verdict is found.gpus[4].verdict is Verdict.OK
    older = HealthOptions(kernel_log=log, xids_since_s=10_000)
    assert one(layer, 4, older).verdict is Verdict.DEAD


def test_kernel_log_that_may_not_be_read_is_said(
    node: FakeNode, layer: DeviceLayer, tmp_path: Path
) -> None:
    found = check_node(layer, HealthOptions(kernel_log=tmp_path / "none"))
    assert [finding.reason for finding in found.findings] == ["kernel-log"]
    assert found.verdict is Verdict.OK


def test_pci_addresses_of_different_tools() -> None:
    assert xids.same_device("0000:3b:00", "00000000:3B:00.0")
    assert not xids.same_device("0000:3b:00", "00000000:3C:00.0")
    assert not xids.same_device("0001:3b:00", "00000000:3B:00.0")


# ---- what a site adds ----


def hook(tmp_path: Path, text: str, status: int = 0) -> tuple[str, ...]:
    path = tmp_path / "hook.sh"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return (str(path),)


def test_hook_speaks_of_gpus_and_of_the_node(
    node: FakeNode, layer: DeviceLayer, tmp_path: Path
) -> None:
    said = {
        "gpus": {
            node.uuids[1]: {"verdict": "dead", "reason": "in repair"},
            "2": {"verdict": "suspect", "reason": "slow in last night's test"},
        },
        "node": {"verdict": "suspect", "reason": "switch"},
    }
    options = HealthOptions(hook=hook(tmp_path, json.dumps(said)), kernel_log=None)
    found = check_node(layer, options)
    assert str(found.gpus[1].findings[0]) == "site (in repair)"
    assert (found.gpus[1].verdict, found.gpus[2].verdict) == (Verdict.DEAD, Verdict.SUSPECT)
    assert [str(finding) for finding in found.findings] == ["site (switch)"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("not JSON", 0),
        ("{}", 1),
        ('{"gpu": {}}', 0),
        ('{"gpus": {"0": {"verdict": "bad"}}}', 0),
        ('{"gpus": {"0": "dead"}}', 0),
        ("[]", 0),
    ],
)
def test_hook_that_fails_is_itself_suspect(
    node: FakeNode, layer: DeviceLayer, tmp_path: Path, text: str, status: int
) -> None:
    options = HealthOptions(hook=hook(tmp_path, text, status), kernel_log=None)
    found = check_node(layer, options)
    assert [finding.reason for finding in found.findings] == ["hook"]
    assert found.verdict is Verdict.SUSPECT


def test_hook_that_hangs_costs_its_timeout(node: FakeNode, layer: DeviceLayer) -> None:
    options = HealthOptions(hook=("sleep", "600"), hook_timeout_s=0.2, kernel_log=None)
    assert "timed out" in str(check_node(layer, options).findings[0])


def test_a_hook_that_cannot_be_killed_is_not_waited_for(
    node: FakeNode, layer: DeviceLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that asks a dead GPU, and hangs in the kernel."""
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", lambda self: None)
        patched.setattr("os.killpg", lambda *unused: None)
        started = time.monotonic()
        options = HealthOptions(hook=("sleep", "6"), hook_timeout_s=0.2, kernel_log=None)
        found = check_node(layer, options)
        assert time.monotonic() - started < 3
    assert "timed out" in str(found.findings[0])


def test_site_overrules_what_a_reason_means(node: FakeNode, layer: DeviceLayer) -> None:
    node.gpu(3).link_active[0] = 0
    dead = HealthOptions(treat={"nvlink-down": Verdict.DEAD}, kernel_log=None)
    fine = HealthOptions(treat={"nvlink-down": Verdict.OK}, kernel_log=None)
    assert one(layer, 3, dead).verdict is Verdict.DEAD
    assert one(layer, 3, fine).verdict is Verdict.OK


# ---- the command ----


def run(node: FakeNode, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", MAIN, "health", "--deadline", "60", *words],
        env=node.env(PYTHONPATH=str(ROOT), **env),
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_prints_a_table_and_a_status(node: FakeNode, tmp_path: Path) -> None:
    log = ("--kernel-log", str(write_log(tmp_path / "kmsg")))
    result = run(node, *log)
    assert result.returncode == 0 and result.stdout.count(" ok ") == 8, result.stderr
    node.gpu(3).remap_pending = 1
    assert run(node, *log).returncode == 3
    node.gpu(4).lost = 1
    result = run(node, *log, "--expect", ",".join(node.uuids), "--json")
    assert result.returncode == 4
    shown = json.loads(result.stdout)
    assert shown["verdict"] == "dead"
    verdicts = {row["uuid"]: row["verdict"] for row in shown["rows"]}
    assert verdicts[node.uuids[3]] == "suspect" and verdicts[node.uuids[4]] == "dead"
    result = run(node, *log, "--gpus", "cuda", CUDA_VISIBLE_DEVICES="0,GPU-00000001")
    assert result.returncode == 4 and "(lost)" not in result.stdout.splitlines()[1]
    node.gpu(4).lost = 0
    assert run(node, *log, "--gpus", "0,1").returncode == 0
    assert run(node, *log, "--treat", "row-remap-pending=ok").returncode == 0
    assert run(node, *log, "--treat", "remap=ok").returncode == 2


def test_command_prints_lines_for_a_scheduler(node: FakeNode, tmp_path: Path) -> None:
    node.gpu(2).remap_failure = 1
    node.gpu(4).lost = 1
    node.gpu(5).remap_pending = 1
    log = str(write_log(tmp_path / "kmsg"))
    result = run(node, "--lines", "--kernel-log", log, "--expect", node.uuids[4])
    assert result.returncode == 0
    assert result.stdout.splitlines() == [
        f"{node.uuids[2]} row-remap-failure",
        "4 lost (GPU lost)",
        f"{node.uuids[4]} not-present (expected, and not enumerated by the driver)",
    ]
    assert run(node, "--lines", FAKE_NVML_STATE="/nonexistent").returncode == 1


def test_command_without_a_driver(node: FakeNode) -> None:
    result = run(node, FAKE_NVML_STATE="/nonexistent")
    assert result.returncode == 1 and "NVML missing" in result.stdout
