"""One round: the job under a supervisor, a fault, and what came of it.

Steps are counted in the log that the last rank writes, not as the supervisor tells; which
checkpoint was complete is read from Megatron's own tracker file while the job runs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from fake_nvml import FakeNode
from supervised import TRACKER, Job, Supervisor

from chaos_kit.faults import LATEST_STEP, NUM_RANKS, Fault
from chaos_kit.forking import PIDS
from chaos_kit.job import (
    LAST_STEP,
    LOSS_TOLERANCE,
    ROOT,
    SCRIPT,
    SPREADS,
    TP,
    Reference,
    distance,
    final_checkpoint,
    flags,
    logged,
    weights,
)
from megatron_ntp.rehearsal.processes import ENVIRONMENT
from megatron_ntp.report.command import load

DEADLINE_S = 240.0
POLL_S = 0.02
HOST = "n1"
LEFT_WAIT_S = 10.0


def launch_words(num_gpus: int) -> str:
    """Options of the supervisor, for a node of so many GPUs."""
    return f"""
        --gpus-per-node {num_gpus} --job-id job --faults faults.txt --keep-replicas --stop-grace 2
        --backoff 0.5 --health-interval 1 --hang-step 10 --hang-save 20
    """


@dataclass
class Watched:
    """What is seen of a job while it runs.

    Attributes:
        last: the step logged last, 0 before the first.
        complete: iterations that Megatron's tracker has named, in order.
        lost: completed steps that were done again, of each restart.
        allowed: how many of them each restart was allowed to lose.
    """

    folder: Path
    loses_newest: bool
    last: int = 0
    complete: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    allowed: list[int] = field(default_factory=list)
    _num_seen: int = 0

    def look(self) -> None:
        """The tracker first: what it says holds for steps that are logged by then."""
        self._look_at_tracker()
        entries = logged(self.folder / "losses.jsonl")
        for step, _ in entries[self._num_seen :]:
            if step <= self.last:
                self.lost.append(self.last - step + 1)
                self.allowed.append(self.last - self._newest_complete())
            self.last = step
        self._num_seen = len(entries)

    def _look_at_tracker(self) -> None:
        try:
            iteration = int((self.folder / "ckpt" / TRACKER).read_text())
        except (FileNotFoundError, ValueError):  # removed, or being written
            return
        if iteration not in self.complete[-1:]:
            self.complete.append(iteration)

    def _newest_complete(self) -> int:
        """At the fault. The damaged one does not count."""
        return self.complete[-2] if self.loses_newest else self.complete[-1]


class Round:
    """A job that meets one fault. Make it, and `run` it once."""

    def __init__(
        self, fault: Fault, folder: Path, reference: Reference, is_cold: bool = False
    ) -> None:
        self._fault, self._folder, self._reference = fault, folder, reference
        folder.mkdir(parents=True)
        shutil.copytree(reference.start, folder / "ckpt")
        self._environ = {**ENVIRONMENT, "SLURMD_NODENAME": HOST}
        del self._environ["CUDA_VISIBLE_DEVICES"]  # the supervisor gives each rank its own
        if not is_cold:
            paths = (ROOT / "tests" / "chaos_kit" / "warm", ROOT, ROOT / "tests")
            self._environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        self._node: FakeNode | None = None
        if fault.outside is not None and fault.outside.what == "lose-gpu":
            self._node = FakeNode.create(folder, num_gpus=NUM_RANKS)
            self._environ = self._node.env(**self._environ)
        self._job = Job(folder)
        self._watched = Watched(folder, fault.loses_newest)
        self._done_at: float | None = None
        self._step_seen = 0.0

    def run(self) -> dict[str, Any]:
        """The round's line of chaos.json."""
        started = time.monotonic()
        self._start()
        try:
            status = self._follow(started)
        finally:
            self._end_everything()
        return self._judge(status, time.monotonic() - started)

    def _start(self) -> None:
        train = [
            *("-m megatron_ntp run --cpu --loss-log losses.jsonl".split()),
            str(SCRIPT),
            *flags(TP, Path("ckpt")),
            *("--ntp", "--ntp-checkpoint-check", "content"),
            *(("--ntp-inject", self._fault.inject) if self._fault.inject else ()),
        ]
        self._supervisor = Supervisor(
            self._folder, launch_words(NUM_RANKS), " ".join(train), self._environ
        )

    def _follow(self, started: float) -> int | None:
        """The status that the job ends with; None if it does not end in time."""
        outside = self._fault.outside
        while time.monotonic() - started < DEADLINE_S:
            status = self._supervisor.process.poll()
            self._watched.look()
            if status is not None:
                return status
            is_open = outside is not None and self._done_at is None
            if is_open and self._is_time(started) and self._happens():
                self._done_at = time.monotonic() - started
            time.sleep(POLL_S)
        return None

    def _is_time(self, started: float) -> bool:
        outside = self._fault.outside
        assert outside is not None
        now = time.monotonic()
        if outside.at_step is None:
            return now - started >= outside.after_s or self._watched.last >= LATEST_STEP
        if self._watched.last < outside.at_step:
            self._step_seen = now
            return False
        return now - self._step_seen >= outside.after_s

    def _happens(self) -> bool:
        """False if the rank is not there: a random moment may come before its start."""
        outside = self._fault.outside
        assert outside is not None
        if outside.what == "kill-supervisor":
            self._supervisor.kill()
            self._start()
        elif outside.what == "lose-gpu":
            assert self._node is not None
            self._node.gpu(outside.rank).lost = 1
        else:
            try:
                os.kill(self._pid(outside.rank), signal.SIGKILL)
            except (AssertionError, ProcessLookupError):
                return False
        return True

    def _pid(self, rank: int) -> int:
        """Raises AssertionError where the rank has no process yet."""
        noted = self._folder / PIDS / str(rank)
        return int(noted.read_text()) if noted.exists() else self._job.pid(rank)

    def _end_everything(self) -> None:
        self._supervisor.kill()
        give_up_at = time.monotonic() + LEFT_WAIT_S
        while (left := self._job.processes()) and time.monotonic() < give_up_at:
            time.sleep(0.1)
        self._left = [str(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()

    # ---- judgement ----

    def _judge(self, status: int | None, seconds: float) -> dict[str, Any]:
        entries = logged(self._folder / "losses.jsonl")
        attempts = self._job.events("attempt-started")
        num_starts = max(len(attempts), len(self._job.events("supervisor-started")))
        differences = [(step, self._difference(step, loss)) for step, loss in entries]
        found: dict[str, Any] = {
            "fault": self._fault.name,
            "detail": self._fault.detail,
            "resumed": status == 0 and self._watched.last == LAST_STEP and num_starts > 1,
            "status": status,
            "attempts": len(attempts),
            "degrees": [attempt["degrees"] for attempt in attempts],
            "steps_lost": sum(self._watched.lost),
            "steps_allowed": sum(self._watched.allowed),
            "final_rel_diff": dict(differences).get(LAST_STEP),
            "max_rel_diff": max((value for _, value in differences), default=None),
            "weights_spreads": self._weights_spreads(),
            "seconds": round(seconds, 1),
        }
        found["problems"] = self._problems(found, num_starts)
        return found

    def _difference(self, step: int, loss: float) -> float:
        undisturbed = self._reference.losses[step]
        return abs(loss - undisturbed) / abs(undisturbed)

    def _weights_spreads(self) -> float | None:
        """How far the final weights are from the undisturbed ones, in spreads of plain Megatron."""
        path = final_checkpoint(self._folder / "ckpt")
        if not (path / "metadata.json").exists():
            return None
        apart = distance(weights(path), self._reference.weights)
        return apart / self._reference.spread

    def _problems(self, found: dict[str, Any], num_starts: int) -> list[str]:
        """What is not as it must be; empty if the round has passed."""
        problems = []
        if found["status"] is None:
            problems.append(f"no end within {DEADLINE_S:g} s")
        elif found["status"] != 0:
            problems.append(f"the supervisor ended with status {found['status']}")
        if num_starts < 2:
            problems.append("the fault has ended no attempt and no supervisor")
        elif not found["resumed"]:
            problems.append(f"did not go on to step {LAST_STEP}")
        expected = sorted(self._fault.degrees)
        if found["degrees"] and sorted(found["degrees"][-1]) != expected:
            problems.append(f"ended at degrees {found['degrees'][-1]}, not {expected}")
        lost, allowed = self._watched.lost, self._watched.allowed
        if any(steps > most for steps, most in zip(lost, allowed, strict=True)):
            problems.append(f"lost {lost} steps of {allowed} allowed")
        for what, most in (
            ("final_rel_diff", LOSS_TOLERANCE),
            ("max_rel_diff", LOSS_TOLERANCE),
            ("weights_spreads", SPREADS),
        ):
            if found[what] is None or not found[what] <= most:
                problems.append(f"{what} is {found[what]}, at most {most:g} is right")
        if self._fault.inject and (pending := load(self._job.path).faults_pending):
            problems.append(f"did not happen: {'; '.join(map(str, pending))}")
        if self._fault.outside is not None and self._done_at is None:
            problems.append("did not happen")
        if self._left:
            problems.append(f"left behind: {self._left}")
        return problems
