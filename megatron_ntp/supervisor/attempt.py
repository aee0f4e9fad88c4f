"""One node's part of one attempt: its agents, what its ranks say, and the end of all of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp import beats
from megatron_ntp.launchers.check import this_host
from megatron_ntp.launchers.nodes import Agent, Placement
from megatron_ntp.launchers.rank import log_name
from megatron_ntp.launchers.start import ask_ranks_to_save, tail_with_error
from megatron_ntp.supervisor import processes
from megatron_ntp.supervisor.agent import NOT_FOR_AGENTS, STOP_SIGNAL
from megatron_ntp.supervisor.stall import Sign, StepTimes

_AGENT_EXTRA_S = 3.0  # beyond what torch gives ranks between SIGTERM and SIGKILL
_GIVE_UP_S = 30.0
_ASK_AGAIN_S = 1.0
LONGEST_END_S = _AGENT_EXTRA_S + _GIVE_UP_S
"""Beside the grace, `NodeAttempt.end` may take that long."""
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Failure:
    """A rank that failed. `status` is negative for the signal that ended it."""

    rank: int
    status: int

    def __str__(self) -> str:
        if self.status < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.status).name}"
        return f"rank {self.rank} ended with status {self.status}"


@dataclass(frozen=True)
class FirstStep:
    """Seconds that the slowest rank of a node took: its start, reading, first step; and its age."""

    start_s: float
    load_s: float
    first_step_s: float
    age_s: float


class NodeAttempt:
    """The agents of this node, from start to end.

    Args:
        number: of the attempt.
        placement: of the job.
        host: this node's name in it.
        address: where the agent of the first ranks listens.
        folder: of the attempt; output goes there.
        command: what each rank runs.
        owner: see `processes`.
        environ: of the ranks.
        grace_s: between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        number: int,
        placement: Placement,
        host: str,
        address: tuple[str, int],
        folder: Path,
        command: Sequence[str],
        owner: processes.Owner,
        environ: Mapping[str, str],
        grace_s: float,
    ) -> None:
        self.number, self.folder = number, folder
        self._placement, self._host, self._address = placement, host, address
        self._command, self._owner, self._grace_s = command, owner, grace_s
        self._agents = placement.agents_of(host)
        self._beats = Path(tempfile.mkdtemp(prefix=_beats_prefix(owner), dir=_beats_dir()))
        self._environ = {
            **environ,
            beats.ENV: str(self._beats),
            processes.OWNER_ENV: owner.ranks,
        }
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._told: dict[int, list[Failure]] = {}  # by agent
        self._asked: set[int] = set()
        self._ask_again_at = 0.0
        self.tail: str | None = None
        self._times = StepTimes()
        self.started_at = 0.0
        self.is_over = False

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(device for _, agent in self._agents for device in agent.devices)

    # ---- start ----

    def start(self) -> None:
        """Starts the agents. From the main thread: they die with the thread that starts them."""
        self.started_at = time.monotonic()
        signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_AGENTS)
        try:
            for agent_rank, agent in self._agents:
                self._running[agent_rank] = self._start(agent_rank, agent)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_AGENTS)

    def _start(self, agent_rank: int, agent: Agent) -> subprocess.Popen[bytes]:
        torchrun = (
            f"--nnodes {len(self._placement.agents)} --node-rank {agent_rank} "
            f"--nproc-per-node {agent.num_ranks} --max-restarts 0 "
            f"--master-addr {self._address[0]} --master-port {self._address[1]} --no-python"
        )
        words = [
            *(sys.executable, "-m", "megatron_ntp.supervisor.agent"),
            *(str(self._report(agent_rank)), str(self._grace_s), str(os.getpid())),
            *torchrun.split(),
            *("--log-dir", str(self._beats)),  # for what torch keeps for itself
            *(sys.executable, "-m", "megatron_ntp.launchers.rank", str(self.folder)),
            *self._command,
        ]
        with (self.folder / f"agent-{agent_rank}.{self._host}.log").open("wb") as log:
            return subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environ, "CUDA_VISIBLE_DEVICES": ",".join(agent.devices)},
                start_new_session=True,  # Ctrl-C is for the supervisor
            )

    def _report(self, agent_rank: int) -> Path:
        """On this node: it is looked for all the time."""
        return self._beats / f"agent-{agent_rank}.json"

    # ---- watch ----

    def statuses(self) -> dict[int, int | None]:
        """Exit status by agent, None while it runs, as a shell has it."""
        found: dict[int, int | None] = {}
        for rank, process in self._running.items():
            status = process.poll()
            found[rank] = 128 - status if status is not None and status < 0 else status
        return found

    def failures(self) -> list[Failure]:
        """Ranks that failed by themselves, as far as agents have told."""
        for agent_rank, _ in self._agents:
            if agent_rank not in self._told:
                with contextlib.suppress(OSError, ValueError):
                    told = json.loads(self._report(agent_rank).read_text(encoding="utf-8"))
                    self._told[agent_rank] = [Failure(one["rank"], one["status"]) for one in told]
        return [failure for told in self._told.values() for failure in told]

    def look(self) -> tuple[dict[int, Sign], float, FirstStep | None]:
        """What ranks last said, the longest of their last steps, and how their start went."""
        found = beats.read(self._beats)
        now = time.monotonic()
        if found:
            self._times.see(found[min(found)])
        signs = {rank: Sign.of(beat, now, _state(beat.pid)) for rank, beat in found.items()}
        return signs, self._times.longest_s, self._first_step(found, now)

    def _first_step(self, found: Mapping[int, beats.Beat], now: float) -> FirstStep | None:
        stepped = [beat for beat in found.values() if beats.FIRST_STEP in beat.marks]
        if not stepped or len(stepped) < len(self.devices):  # a spare node has no ranks
            return None
        slowest = max(stepped, key=lambda beat: beat.started + beat.marks[beats.FIRST_STEP])
        marks = slowest.marks
        train = marks.get("train", 0.0)
        load = marks.get("load", train)
        return FirstStep(
            start_s=slowest.started - self.started_at + load,
            load_s=train - load,
            first_step_s=marks[beats.FIRST_STEP] - train,
            age_s=now - slowest.started - marks[beats.FIRST_STEP],
        )

    def _tail(self) -> str | None:
        """The end of the output of a rank that speaks of an error."""
        return tail_with_error(
            [
                self.folder / log_name(agent.first_rank + local, this_host(self._environ))
                for _, agent in self._agents
                for local in range(agent.num_ranks)
            ]
            + [self.folder / f"agent-{rank}.{self._host}.log" for rank, _ in self._agents]
        )

    # ---- end ----

    def ask_ranks_to_save(self) -> None:
        """SIGTERM to each rank, once. Called again and again: an agent may only now start them."""
        if time.monotonic() < self._ask_again_at:
            return
        self._ask_again_at = time.monotonic() + _ASK_AGAIN_S
        ask_ranks_to_save(self._running.values(), self._asked)

    def end(self) -> set[int]:
        """Ends every process of the attempt; returns those that would not go."""
        running = [process for process in self._running.values() if process.poll() is None]
        for process in running:
            process.send_signal(STOP_SIGNAL)
        give_up_at = time.monotonic() + self._grace_s + _AGENT_EXTRA_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, give_up_at - time.monotonic()))
        left = processes.kill_all(lambda: processes.of_attempt(self._owner), _GIVE_UP_S)
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
        processes.reap_adopted([process.pid for process in self._running.values()])
        self.failures()
        shutil.rmtree(self._beats, ignore_errors=True)
        self.tail = self._tail() if any(self.statuses().values()) else None
        self.is_over = True
        return left


def _beats_dir() -> Path:
    """A file system of the node, in memory where there is one."""
    return next((p for p in (_SHM,) if os.access(p, os.W_OK)), Path(tempfile.gettempdir()))


def _beats_prefix(owner: processes.Owner) -> str:
    return f"megatron-ntp-beats-{owner.job}-{owner.node}-"


def steps_left_behind(owner: processes.Owner) -> int:
    """The furthest step in beats that a killed supervisor of this place left; removes them."""
    step = -1
    for folder in _beats_dir().glob(_beats_prefix(owner) + "*"):
        step = max([step, *(beat.iteration for beat in beats.read(folder).values())])
        shutil.rmtree(folder, ignore_errors=True)
    return step


def _state(pid: int) -> str:
    found = processes.stat(pid)
    return found.state if found is not None else ""
