"""Supervisors as processes, and a stand-in for the training that costs no torch.

The stand-in counts steps in lock-step with the other ranks, says them in beats as Megatron under
--ntp does, and writes its step into the checkpoint's tracker, so that a restart goes on from there.
What a test needs of it is switched on by files in its working folder:

    die-R       rank R ends with this status, by SIGKILL if it is negative
    stray-R     rank R starts a process in a session of its own; "bare": without any variables
    slow-save   the save of ranks that were asked to end takes so many seconds
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from megatron_ntp import events

ROOT = Path(__file__).resolve().parent.parent
TRACKER = "latest_checkpointed_iteration.txt"

STAND_IN = """
import os, pathlib, signal, subprocess, sys, time
sys.path.insert(0, ROOT)
from megatron_ntp.beats import BeatWriter

def value(flag, default):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
beats = BeatWriter(os.environ["MEGATRON_NTP_BEATS"], rank)
tracker = pathlib.Path(value("--save", ".")) / "latest_checkpointed_iteration.txt"
tracker.parent.mkdir(exist_ok=True)
first = int(tracker.read_text()) if tracker.exists() else 0
print("rank", rank, "of", world, "device", devices[int(os.environ["LOCAL_RANK"])],
      "failed", value("--ntp-failed", "none"), "load", value("--ntp-load", "full"),
      "from", first, flush=True)

asked = []
if "--exit-signal-handler" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
stray = pathlib.Path(f"stray-{rank}")
if stray.exists():
    env = {} if stray.read_text() == "bare" else None
    process = subprocess.Popen(["sleep", "1234.5"], env=env, start_new_session=True)
    pathlib.Path(f"stray-pid-{rank}").write_text(str(process.pid))

def in_step(step):
    mine = pathlib.Path(f"at-{os.environ['MASTER_PORT']}-{rank}")
    part = mine.with_name("part-" + mine.name)
    part.write_text(f"{step} {len(asked)}")
    part.replace(mine)
    while True:
        found = [p.read_text().split() for p in pathlib.Path().glob(
            f"at-{os.environ['MASTER_PORT']}-*")]
        if len(found) == world and all(int(at) >= step for at, _ in found):
            return any(int(told) for at, told in found if int(at) == step)
        time.sleep(0.01)

def save(step):
    if rank == 0:
        part = tracker.with_name("part")
        part.write_text(str(step))
        part.replace(tracker)

beats.say("setup")
beats.say("load")
beats.say("train", first)
for step in range(first + 1, int(value("--steps", "10")) + 1):
    time.sleep(0.1)
    stop = in_step(step)
    beats.step_done(step)
    if step % int(value("--save-interval", "5")) == 0 or stop:
        save(step)
    if stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it may still be on its way
        slow = pathlib.Path("slow-save")
        time.sleep(float(slow.read_text()) if slow.exists() else 0)
        print("saved and stopped at", step, flush=True)
        sys.exit(0)
    die = pathlib.Path(f"die-{rank}")
    if die.exists():
        status = int(die.read_text())
        if status < 0:
            die.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(status)
beats.say("done")
print("done", flush=True)
"""


def wait_for[T](what: str, found: Callable[[], T], timeout_s: float = 120.0) -> T:
    """What `found` returns as soon as it is true."""
    give_up_at = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < give_up_at, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)
    return value


class Supervisor:
    """`megatron-ntp launch` of one node, started when this is made. End it with `kill`."""

    def __init__(
        self, folder: Path, words: str, train: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        (folder / "train.py").write_text(STAND_IN.replace("ROOT", repr(str(ROOT)), 1))
        self.output_path = folder / f"output-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "megatron_ntp", "launch", *words.split(), "--"]
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *train.split()],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait(self, timeout_s: float = 120.0) -> int:
        """Exit status; kills it and fails if it does not end."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end within {timeout_s:g} s:\n{self.output}") from None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to the supervisor alone: what it has started must go by itself."""
        self.process.kill()
        self.process.wait()


class Job:
    """A job's folder, as a test looks at it."""

    def __init__(self, folder: Path, job_id: str = "job") -> None:
        self.folder, self.path = folder, folder / "ntp-runs" / job_id

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        found = events.read(path) if path.exists() else []
        return [event for event in found if name in (None, event["event"])]

    def wait_for(self, name: str, attempt: int, timeout_s: float = 120.0) -> dict[str, Any]:
        """The event of this name of an attempt."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self.events(name) if e.get("attempt") == attempt), None)

        try:
            event = wait_for(f"{name} of attempt {attempt}", found, timeout_s)
        except AssertionError as error:
            outputs = [path.read_text() for path in self.folder.glob("output-*")]
            raise AssertionError("\n".join([str(error), *outputs])) from None
        assert event is not None
        return event

    def ranks(self, attempt: int) -> dict[str, str]:
        """Output by rank and host, such as 03.n2."""
        paths = sorted((self.path / f"attempt-{attempt:03d}").glob("rank-*.log"))
        return {path.name[8:-4]: path.read_text() for path in paths}

    def pid(self, rank: int) -> int:
        """The process of a rank that runs now."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process.pid
        raise AssertionError(f"no process of rank {rank}")

    def processes(self) -> list[psutil.Process]:
        """Agents, ranks and whatever they have started, as far as they work in our folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_supervisor = "launch" in process.cmdline()
                alive = process.status() != psutil.STATUS_ZOMBIE
                if process.cwd() == str(self.folder) and not is_supervisor and alive:
                    found.append(process)
        return found
