"""Found 500 W, boosted 700 W, then everything that ends a job: real processes, real signals.

These are the cases of the table in docs/power.md.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNode
from power_kit import site_file

# Dozens of processes start and end here, which a loaded machine takes its time for.
pytestmark = pytest.mark.timeout(900)

TRAINER = Path(__file__).with_name("power_trainer.py")
ROOT = Path(__file__).parents[2]
KEEPER = "megatron_ntp.device.keeper_process"
NVML = "megatron_ntp.device.nvml_process"


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 240) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"gave up waiting: {what}"
        time.sleep(0.02)


@dataclass
class Trainer:
    """One started trainer and what it has said."""

    process: subprocess.Popen[str]
    log_path: Path
    said: dict[str, dict[str, Any]] = field(default_factory=dict)

    def expect(self, event: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        while event not in self.said:
            line = self.process.stdout.readline()
            assert line, f"the trainer ended without {event!r}: {self.process.wait()}"
            found = json.loads(line)
            self.said[found["event"]] = found
        return self.said[event]

    def warnings(self) -> list[str]:
        return [line for line in self.log_path.read_text().splitlines() if "WARNING" in line]

    def children(self, module: str) -> list[int]:
        """Processes of a module that belong to this trainer: its keeper, or the keeper's NVML."""
        keepers = _children(self.process.pid, KEEPER)
        if module == KEEPER:
            return keepers
        return [pid for keeper in keepers for pid in _children(keeper, module)]

    def kill_all(self) -> None:
        """As a control group is killed: nobody gets to restore anything."""
        pids = [self.process.pid, *self.children(KEEPER), *self.children(NVML)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # none may see another one go
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        wait_for(lambda: not any(_alive(pid) for pid in pids), "killed processes to go")


def _children(parent: int, module: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_text().split("\0")
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if module in words and int(stat[1]) == parent:
            found.append(int(entry.name))
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Site:
    """The node, its state folder, boot id and driver id, and jobs on it."""

    def __init__(self, node: FakeNode, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.site = site_file(folder)
        self.state_dir = folder / "state"
        self.boot_id_file = folder / "boot_id"
        self.boot_id_file.write_text("boot-1\n")
        self.driver_dir = folder / "driver"
        self.driver_dir.mkdir()
        self.trainers: list[Trainer] = []

    def start(
        self,
        end: str,
        gpus: slice = slice(0, 7),
        until_w: float = 700,
        claim_timeout_s: float = 60,  # for what a loaded machine is slow to end
        **settings: Any,
    ) -> Trainer:
        uuids = self.node.uuids[gpus]
        options = {
            "settings": {
                "ntp_power": "boost",
                "ntp_power_site": str(self.site),
                "ntp_power_state_dir": str(self.state_dir),
                "ntp_power_deadline": 60.0,  # other work may slow this machine down
                **settings,
            },
            "gpu_uuids": uuids,
            "num_gpus": len(uuids) + 1,
            "num_alive": len(uuids),
            "boot_id_file": str(self.boot_id_file),
            "driver_dir": str(self.driver_dir),
            "until_w": until_w,
            "claim_timeout_s": claim_timeout_s,
            "end": end,
            "job_id": f"job-{len(self.trainers)}",
        }
        log_path = self.folder / f"trainer-{len(self.trainers)}.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, str(TRAINER), json.dumps(options)],
                env=self.node.env(PYTHONPATH=str(ROOT)),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.trainers.append(Trainer(process, log_path))
        return self.trainers[-1]

    def power(self, *words: str) -> subprocess.CompletedProcess[str]:
        code = "import sys; from megatron_ntp.cli import main; sys.exit(main(sys.argv[1:]))"
        return subprocess.run(
            [
                *(sys.executable, "-c", code, "power", *words, "--state-dir", str(self.state_dir)),
                *("--deadline", "60"),
                *("--boot-id-file", str(self.boot_id_file), "--driver-dir", str(self.driver_dir)),
            ],
            env=self.node.env(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            check=False,
        )

    def outcomes(self) -> list[str]:
        """Of `power restore --json`."""
        result = self.power("restore", "--json")
        return [row["outcome"] for row in json.loads(result.stdout)["rows"]]

    def records(self) -> list[str]:
        return [path.stem for path in self.state_dir.glob("*.json")]

    def wait_restored(self) -> None:
        wait_for(lambda: self.node.limits_w() == [500.0] * 8, f"500 W, not {self.node.limits_w()}")
        wait_for(lambda: self.records() == [], "records to go")

    def reload_driver(self) -> None:
        self.node.reload_driver()
        self.driver_dir.rename(self.folder / "unloaded")
        self.driver_dir.mkdir()


@pytest.fixture
def site(node: FakeNode, tmp_path: Path) -> Iterator[Site]:
    found = Site(node, tmp_path)
    yield found
    for trainer in found.trainers:
        trainer.process.kill()
        trainer.process.communicate()


def boosted(site: Site, end: str, **fields: Any) -> Trainer:
    trainer = site.start(end, **fields)
    assert trainer.expect("boosted")["limit_w"] == 700
    return trainer


BOOSTED = [700.0] * 7 + [500.0]


@pytest.mark.parametrize("end", ["return", "leave", "exception"])
def test_process_ends_by_itself(site: Site, end: str) -> None:
    trainer = boosted(site, end)
    trainer.process.wait(240)
    site.wait_restored()
    assert {write.uuid for write in site.node.writes()} == set(site.node.uuids[:7])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_process_is_ended_by_a_signal(site: Site, number: signal.Signals) -> None:
    trainer = boosted(site, "wait")
    assert site.node.limits_w() == BOOSTED
    trainer.process.send_signal(number)
    trainer.process.wait(240)
    site.wait_restored()


def test_sigkill_of_the_whole_group_leaves_the_keeper_to_restore(site: Site) -> None:
    """torchrun kills the process group of a worker; the keeper is in a session of its own."""
    trainer = boosted(site, "wait")
    os.killpg(trainer.process.pid, signal.SIGKILL)
    site.wait_restored()


def test_sigkill_of_everything_then_restart(site: Site) -> None:
    trainer = boosted(site, "wait")
    trainer.kill_all()
    assert site.node.limits_w() == BOOSTED and len(site.records()) == 7
    second = boosted(site, "wait")
    record = json.loads((site.state_dir / f"{site.node.uuids[0]}.json").read_text())
    assert record["found_mw"] == 500_000 and record["job_id"] == "job-1"
    second.process.kill()
    site.wait_restored()


def test_sigkill_of_everything_then_power_restore(site: Site) -> None:
    boosted(site, "wait").kill_all()
    dry = site.power("restore", "--dry-run")
    assert dry.stdout.count("restored") == 7 and "nothing was written" in dry.stdout
    assert site.node.limits_w() == BOOSTED and len(site.records()) == 7
    shown = site.power("status").stdout
    assert shown.count("gone: run `megatron-ntp power restore`") == 7
    assert site.outcomes() == ["restored"] * 7
    site.wait_restored()
    assert site.outcomes() == []


def test_reboot(site: Site) -> None:
    boosted(site, "wait").kill_all()
    site.boot_id_file.write_text("boot-2\n")
    site.reload_driver()
    before = len(site.node.writes())
    assert site.outcomes() == ["left alone: the node rebooted since"] * 7
    assert len(site.node.writes()) == before and site.records() == []
    assert site.node.limits_w() == [700.0] * 8, "the driver's default, as the boot left it"


def test_driver_reload(site: Site) -> None:
    boosted(site, "wait").kill_all()
    site.reload_driver()
    before = len(site.node.writes())
    assert site.outcomes() == ["left alone: the driver was loaded anew since"] * 7
    assert len(site.node.writes()) == before and site.records() == []


def test_gpu_lost_in_between(site: Site) -> None:
    trainer = boosted(site, "wait")
    site.node.gpu(2).lost = 1
    trainer.process.kill()
    wait_for(lambda: len(site.records()) == 1, "six GPUs to be restored")
    others = [watts for index, watts in enumerate(site.node.limits_w()) if index != 2]
    assert others == [500.0] * 7
    result = site.power("restore")
    assert result.returncode == 1 and "not restored yet" in result.stdout
    site.node.gpu(2).lost = 0
    assert site.outcomes() == ["restored"]
    site.wait_restored()


def test_two_jobs_on_one_node(site: Site) -> None:
    first = boosted(site, "wait", gpus=slice(0, 3))
    second = boosted(site, "wait", gpus=slice(4, 7))
    assert site.node.limits_w() == [700.0] * 3 + [500.0] + [700.0] * 3 + [500.0]
    assert set(site.outcomes()) == {"in use by a live job"}
    first.kill_all()
    outcomes = site.outcomes()
    assert sorted(outcomes) == ["in use by a live job"] * 3 + ["restored"] * 3
    assert site.node.limits_w() == [500.0] * 4 + [700.0] * 3 + [500.0]
    second.process.terminate()
    site.wait_restored()


def test_second_job_on_the_same_gpus_waits_for_no_one(site: Site) -> None:
    boosted(site, "wait")
    second = site.start("return", until_w=0, claim_timeout_s=0.2)
    assert "in the hands of job job-0" in second.expect("started")["message"]
    assert site.node.limits_w() == BOOSTED


def test_sigterm_to_every_process_of_the_job(site: Site) -> None:
    """As scancel does. The keeper restores; the trainer may still write a checkpoint."""
    trainer = boosted(site, "wait")
    (keeper,) = trainer.children(KEEPER)
    for pid in (keeper, *trainer.children(NVML)):
        os.kill(pid, signal.SIGTERM)
    site.wait_restored()
    wait_for(lambda: trainer.warnings() != [], "the trainer to notice")
    time.sleep(0.3)
    (warning,) = trainer.warnings()
    assert "SIGTERM received" in warning and "training goes on" in warning
    assert trainer.process.poll() is None and site.node.limits_w() == [500.0] * 8


def test_sigkill_of_the_keeper_alone(site: Site) -> None:
    trainer = boosted(site, "wait")
    (keeper,) = trainer.children(KEEPER)
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: site.node.limits_w() == [500.0] * 8, "a new keeper to settle the old records")
    (warning,) = trainer.warnings()
    assert "the power keeper is gone" in warning
    assert trainer.process.poll() is None
    trainer.process.terminate()
    site.wait_restored()


def test_child_that_inherited_the_socket_does_not_hide_the_death(site: Site) -> None:
    trainer = boosted(site, "fork_and_wait")
    trainer.expect("forked")
    os.kill(trainer.process.pid, signal.SIGKILL)
    site.wait_restored()
    os.killpg(trainer.process.pid, signal.SIGKILL)  # the child


def test_keeper_killed_inside_a_write_keeps_its_claim_until_the_write_is_over(site: Site) -> None:
    trainer = boosted(site, "wait")
    site.node.add_rule("nvmlDeviceSetPowerManagementLimit", gpu=0, hang_ms=600_000, times=1)
    (keeper,), (nvml,) = trainer.children(KEEPER), trainer.children(NVML)
    trainer.process.kill()  # the keeper starts to restore, and hangs in GPU 0
    wait_for(lambda: site.node.state.rules[0].remaining == 0, "the hanging write")
    os.kill(keeper, signal.SIGKILL)
    assert set(site.outcomes()) == {"in use by a live job"}
    site.node.clear_rules()
    wait_for(lambda: not _alive(nvml), "the late write to be over")
    outcomes = site.outcomes()
    assert outcomes == ["already at the found limit"] + ["restored"] * 6
    site.wait_restored()
