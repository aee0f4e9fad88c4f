"""Supervisors on this machine, with a stand-in for the training: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from supervised import TRACKER, Job, Supervisor, wait_for

ONE_NODE = "--gpus-per-node 4 --tp 2 --job-id job --faults faults.txt"
FAST = "--stop-grace 2 --health-interval 0.5 --backoff 0.2 --hang-step 2"
TRAIN = "train.py --ntp --save ckpt --load ckpt --exit-signal-handler"


def train(words: str) -> str:
    """A plain script: `launch` would start one that has --ntp through the plugin."""
    return f"-m {words.replace('train.py', 'train', 1)}"


@pytest.fixture
def started() -> Iterator[list[Supervisor]]:
    """Supervisors that a test starts; they are gone after it."""
    found: list[Supervisor] = []
    yield found
    for supervisor in found:
        if supervisor.process.poll() is None:
            supervisor.kill()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_the_life_of_a_job(tmp_path: Path, started: list[Supervisor]) -> None:
    """A GPU comes back, a rank hangs, the supervisor is killed and started again, all stops."""
    faults, job = tmp_path / "faults.txt", Job(tmp_path)
    host = os.uname().nodename
    faults.write_text(f"{host} 1 XID 79\n")
    (tmp_path / "stray-0").write_text("bare")
    words = f"{ONE_NODE} {FAST} --ntp-regrow-at checkpoint"
    endless = train(f"{TRAIN} --steps 100000")

    first = Supervisor(tmp_path, words, endless)
    started.append(first)
    job.wait_for("first-step", 1)
    assert job.events("attempt-started")[0]["degrees"] == [1, 2]
    assert [job.events(name)[0]["attempt"] for name in ("health", "decision")] == [1, 1]
    ranks = job.ranks(1)
    assert [text.split()[5] for text in ranks.values()] == ["2", "3", "0"], "lowest degree last"
    assert all("failed 0:1 load or-scratch" in text for text in ranks.values())

    stray = int((tmp_path / "stray-pid-0").read_text())
    assert is_alive(stray)
    (tmp_path / "stray-0").write_text("plain")
    faults.write_text("")
    regrown = job.wait_for("attempt-ended", 1)
    assert regrown["cause"] == "regrow" and "grows to 2,2" in regrown["reason"]
    assert not is_alive(stray), "an orphan ends with its attempt"
    job.wait_for("first-step", 2)
    assert job.events("attempt-started")[1]["degrees"] == [2, 2]
    assert all("failed none" in text for text in job.ranks(2).values())

    os.kill(job.pid(3), signal.SIGSTOP)
    hung = job.wait_for("fault-detected", 2)
    assert re.search(r"furthest behind: rank 3,.*stopped by a signal", hung["reason"]), hung
    assert 2 <= hung["detection_s"] < 6
    job.wait_for("first-step", 3)

    second = Supervisor(tmp_path, words, endless)
    assert second.wait() == 2 and "at work already" in second.output
    stray = int((tmp_path / "stray-pid-0").read_text())
    assert is_alive(stray)
    first.kill()
    wait_for("the end of every process", lambda: not job.processes(), 10)
    assert not is_alive(stray)
    before = job.events()

    (tmp_path / "stray-0").unlink()
    (tmp_path / "slow-save").write_text("3")
    site = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "nowhere:1"}  # as Kubernetes may set
    third = Supervisor(tmp_path, words, endless, site)
    started.append(third)
    job.wait_for("first-step", 4)
    taken = job.events("attempt-ended")[-1]
    assert taken["attempt"] == 3 and "supervisor was killed" in taken["reason"]
    assert job.events()[: len(before)] == before, "one log goes on"
    assert taken["step"] >= 1 and taken["checkpoint"] == -1

    third.send(signal.SIGTERM)
    for process in job.processes():  # Slurm signals all of them, and the save outlasts the grace
        process.send_signal(signal.SIGTERM)
    assert third.wait() == 0, third.output
    stopped = int(next(iter(job.ranks(4).values())).split()[-1])
    assert (tmp_path / "ckpt" / TRACKER).read_text() == str(stopped)
    assert not job.processes()
    assert job.events("finished")[-1]["status"] == 0


def test_a_crash_loop_ends_with_93_after_two_attempts(
    tmp_path: Path, started: list[Supervisor]
) -> None:
    supervisor = Supervisor(tmp_path, f"{ONE_NODE} {FAST}", train(f"{TRAIN} --steps wrong"))
    started.append(supervisor)
    assert supervisor.wait() == 93, supervisor.output
    job = Job(tmp_path)
    assert [event["status"] for event in job.events("attempt-ended")] == [1, 1]
    assert "2 attempts in a row made no progress" in supervisor.output
    assert "waiting 0.2 s before the next attempt" in supervisor.output
    assert "ValueError: invalid literal for int() with base 10: 'wrong'" in supervisor.output
    assert not job.processes()


def test_a_signal_while_agents_start(tmp_path: Path, started: list[Supervisor]) -> None:
    """There is no rank yet that could be asked to save; those that come are asked, too."""
    supervisor = Supervisor(tmp_path, f"{ONE_NODE} {FAST}", train(f"{TRAIN} --steps 100000"))
    started.append(supervisor)
    Job(tmp_path).wait_for("attempt-started", 1)
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait(60) in (0, 128 + signal.SIGTERM), supervisor.output


def test_a_rank_forbids_restarts(tmp_path: Path, started: list[Supervisor]) -> None:
    (tmp_path / "die-1").write_text("93")
    supervisor = Supervisor(tmp_path, f"{ONE_NODE} {FAST}", train(TRAIN))
    started.append(supervisor)
    assert supervisor.wait() == 93, supervisor.output
    (ended,) = Job(tmp_path).events("attempt-ended")
    assert ended["status"] == 93 and "rank 1 ended with status 93" in ended["reason"]
    assert "a restart would not help" in supervisor.output


def test_a_uniform_job_with_a_failed_gpu_is_told_of_ntp(
    tmp_path: Path, started: list[Supervisor]
) -> None:
    (tmp_path / "faults.txt").write_text(f"{os.uname().nodename} 1 XID 79\n")
    supervisor = Supervisor(tmp_path, f"{ONE_NODE} {FAST}", train("train.py"))
    started.append(supervisor)
    assert supervisor.wait() == 93, supervisor.output
    assert "slot 1: XID 79" in supervisor.output
    assert "add --ntp to the training command" in supervisor.output
    assert not Job(tmp_path).events("attempt-started")
