"""A job's folder: whose it is, attempts, and one supervisor per node."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ntp.supervisor.guards import Ledger
from megatron_ntp.supervisor.state import (
    AttemptRecord,
    Holder,
    Identity,
    JobFolder,
    JobState,
    NodeLock,
    RunStateError,
    identify,
    process_start,
)

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_START_TIME": "1000"}


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "runs", Identity("explicit", "a"))
    state, aside = folder.open()
    assert aside is None and state == JobState(Identity("explicit", "a"))
    record = AttemptRecord(1, (2, 1), 5, "rank 3 died", 137)
    state = replace(state.with_attempt(record), ledger=Ledger(5, 8, 1, (1.5,)))
    folder.write(state)
    assert JobFolder(tmp_path / "runs", Identity("explicit", "a")).open() == (state, None)


def test_attempts_are_counted_on(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, Identity("explicit", "a"))
    state, _ = folder.open()
    assert folder.next_number(state) == 1
    folder.make_attempt(1, "{}")
    assert folder.next_number(state) == 2, "the folder of a supervisor that died early counts"
    assert folder.next_number(state.with_attempt(AttemptRecord(1000))) == 1001
    assert (folder.make_attempt(1001, "{}") / "placement.json").read_text() == "{}"


def test_who_a_job_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert identify("x", ["a"], SLURM) == Identity("explicit", "x")
    mine = identify(None, ["a"], SLURM)
    assert mine == Identity("slurm", "7", 0, "1000", mine.command)
    assert mine.continues(identify(None, ["a"], SLURM))
    assert not mine.continues(identify(None, ["b"], SLURM)), "the next command of a batch script"
    again = identify(None, ["a", "--name=2"], {**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert again.continues(mine), "queued again"
    assert identify(None, ["a"], {}) == identify(None, ["a"], {})
    assert identify(None, ["a"], {}) != identify(None, ["b"], {})
    for bad in ("", "../up", ".hidden", "a/b"):
        with pytest.raises(RunStateError, match="names a folder"):
            identify(bad, [], {})


@pytest.mark.parametrize(
    ("earlier", "now", "same"),
    [
        (Identity("explicit", "a"), Identity("explicit", "a"), True),
        (Identity("slurm", "7", 0, "1000"), Identity("slurm", "7", 0, "1000"), True),
        (Identity("slurm", "7", 0, "1000"), Identity("slurm", "7", 1, "2000"), True),
        (Identity("slurm", "7", 0, "1000"), Identity("slurm", "7", 0, "5000"), False),
        (Identity("slurm", "7", 3, "1000"), Identity("slurm", "7", 0, "5000"), False),
        (Identity("command", "j", 0, "boot1"), Identity("command", "j", 0, "boot1"), True),
        (Identity("command", "j", 0, "boot1"), Identity("command", "j", 0, "boot2"), False),
        (Identity("explicit", "7"), Identity("slurm", "7", 0, ""), False),
    ],
)
def test_stale_state_is_put_aside(
    tmp_path: Path, earlier: Identity, now: Identity, same: bool
) -> None:
    folder = JobFolder(tmp_path, earlier)
    state, _ = folder.open()
    folder.write(state.with_attempt(AttemptRecord(4)))
    later, aside = JobFolder(tmp_path, now).open()
    if same:
        assert aside is None and later.attempts[-1].number == 4 and later.identity == now
    else:
        assert aside is not None and (aside / "job.json").exists()
        assert aside.name.startswith(f"{now.name}.stale-") and later.attempts == ()


def test_a_command_that_has_ended_starts_anew(tmp_path: Path) -> None:
    for identity, again in ((Identity("command", "j"), True), (Identity("explicit", "e"), False)):
        folder = JobFolder(tmp_path, identity)
        state, _ = folder.open()
        folder.write(replace(state, finished=True))
        assert (JobFolder(tmp_path, identity).open()[1] is not None) == again


def test_damaged_state_is_an_error(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, Identity("explicit", "a"))
    folder.open()
    (folder.path / "job.json").write_text('{"version": 1')
    with pytest.raises(RunStateError, match="is not the state of a job"):
        folder.open()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunStateError, match="--run-dir"):
        JobFolder(tmp_path / "file", Identity("explicit", "a")).open()


# Locks


def test_a_supervisor_at_work_keeps_others_away(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    mine = NodeLock(path, Holder.me("n1"))
    assert mine.take() is None
    assert mine.take() == Holder.me("n1"), "taking it twice is no quarrel with oneself"
    other = Holder("n1", Holder.me("n1").boot, os.getppid(), process_start(os.getppid()) or 0)
    with pytest.raises(RunStateError, match=f"process {os.getpid()} on n1"):
        NodeLock(path, other).take()
    mine.release()
    assert NodeLock(path, other).take() is None


def test_the_lock_of_a_dead_supervisor_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    me = Holder.me("n1")
    theirs = Holder("n1", me.boot, process.pid, process_start(process.pid) or 0)
    NodeLock(path, theirs).take()
    with pytest.raises(RunStateError, match="at work already"):
        NodeLock(path, me).take()
    process.kill()
    time.sleep(0.1)
    assert process_start(process.pid) is None, "a zombie is dead"
    assert NodeLock(path, me).take() == theirs
    process.wait()


def test_a_reused_process_id_is_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    me = Holder.me("n1")
    NodeLock(path, replace(me, started=me.started - 1)).take()
    assert NodeLock(path, me).take() is not None


def test_a_lock_of_another_host_counts_while_it_is_fresh(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    NodeLock(path, replace(Holder.me("n2"), boot="other")).take()
    with pytest.raises(RunStateError, match="on n2"):
        NodeLock(path, Holder.me("n1")).take()
    os.utime(path, (time.time() - 300,) * 2)
    assert NodeLock(path, Holder.me("n1")).take() is not None
