"""One node's part of a placed job: one torchrun per agent, with devices, logs and signals.

[Signals] The batch script has SIGUSR1 sent to everything in the step when the time limit is near.
Only this process acts on it, and sends SIGTERM to the ranks themselves, which with Megatron's
--exit-signal-handler means: finish the step, save, end with 0. torchrun must not get a SIGTERM
then, since it would kill ranks that are still saving after 30 s; it and the ranks ignore SIGUSR1.
SIGTERM and SIGINT to this process stop the ranks at once.

[Status] srun reports the highest status of all nodes, which may be that of a rank that was ended
because another one failed. So each node also leaves its own in a file `exit.HOST`.

[Remains] Nothing that ranks have started outlives this process, unless it is killed itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.errors import UnsupportedFlagError
from megatron_ntp.launchers.nodes import Agent, Placement
from megatron_ntp.launchers.parent import adopt_orphans
from megatron_ntp.launchers.rank import log_name

POLL_S = 0.2
STOP_DEADLINE_S = 40.0
TAIL_NUM_LINES = 25
_TAIL_NBYTES = 1 << 17  # outputs of long runs are large
DO_NOT_RESTART = 93

_FOR_ONE_START = {
    "--ckpt-step": f"write that iteration into {TRACKER} of --load instead: newer checkpoints are "
    "then passed over",
    "--override-ckpt-iteration": "start once by torchrun alone, until it has saved",
    "--finetune": "give the weights to begin from as --pretrained-checkpoint instead",
    "--no-load-optim": "with --ntp, --ntp-load model-only does so once",
}
"""Flags that are meant for one start, and what else does what they do."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def training_command(words: Sequence[str], placement: Placement) -> list[str]:
    """What each rank runs: the words, a Python in front of a script, and the failed slots behind.

    Raises:
        UnsupportedFlagError: the words do not let the job run with what is left.
    """
    command = [sys.executable, *words] if words[0].endswith(".py") else list(words)
    if not placement.failed:
        return command
    own = [word for word in words if word.partition("=")[0] in ("--ntp-failed", "--ntp-degrees")]
    if "--ntp" not in words or own:
        told = f"remove {own[0]} from" if own else "add --ntp to"
        raise UnsupportedFlagError(
            f"slots {placement.failed} have failed, so this job needs nonuniform tensor "
            f"parallelism: {told} the training command (the failed slots are added here)"
        )
    return [*command, "--ntp-failed", placement.failed]


def refuse_rewinding(words: Sequence[str]) -> None:
    """For a training command that will be started again and again.

    Raises:
        UnsupportedFlagError: it would throw away what was trained at each restart.
    """
    flags = [word.partition("=")[0] for word in words]
    for flag in flags if "--save" in flags else ():
        if flag in _FOR_ONE_START:
            raise UnsupportedFlagError(
                f"remove {flag} from the training command: every restart would obey it anew and "
                f"lose what was trained; {_FOR_ONE_START[flag]}"
            )


def agent_command(
    agent_rank: int,
    agent: Agent,
    placement: Placement,
    address: tuple[str, int],
    logs: Path,
    training: Sequence[str],
) -> list[str]:
    """The torchrun of one agent."""
    torchrun = (
        f"--nnodes {len(placement.agents)} --node-rank {agent_rank} "
        f"--nproc-per-node {agent.num_ranks} --max-restarts 0 "
        f"--master-addr {address[0]} --master-port {address[1]} --no-python"
    )
    return [
        *(sys.executable, "-m", "megatron_ntp.launchers.agent"),
        *torchrun.split(),
        *(sys.executable, "-m", "megatron_ntp.launchers.rank", str(logs)),
        *training,
    ]


class NodeRun:
    """The agents of this node, from start to end."""

    def __init__(
        self,
        placement: Placement,
        host: str,
        address: tuple[str, int],
        logs: Path,
        training: Sequence[str],
    ) -> None:
        self._host = host
        self._logs = logs
        self._agents = placement.agents_of(host)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._placement = placement
        self._address = address
        self._training = training
        self._stop_requested = False
        self._save_requested = False
        self._asked: set[int] | None = None  # ranks, by process id

    def run(self, environ: Mapping[str, str]) -> int:
        """Start, watch, end; returns the status of this node. Called once."""
        adopt_orphans()
        signal.signal(signal.SIGUSR1, self._on_signal)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        for agent_rank, agent in self._agents:
            self._start(agent_rank, agent, environ)
        status = self._watch()
        _end_descendants()
        (self._logs / f"exit.{self._host}").write_text(f"{status}\n")
        if status and not self._stop_requested:
            self._print_tail()
        return status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._save_requested = True
        else:
            self._stop_requested = True

    def _start(self, agent_rank: int, agent: Agent, environ: Mapping[str, str]) -> None:
        command = agent_command(
            agent_rank, agent, self._placement, self._address, self._logs, self._training
        )
        self._processes.append(
            subprocess.Popen(
                command,
                env={**environ, "CUDA_VISIBLE_DEVICES": ",".join(agent.devices)},
                preexec_fn=_ignore_save_signal,
            )
        )

    def _watch(self) -> int:
        """Status of the first agent that fails, or 0 when all have ended well."""
        while True:
            statuses = [process.poll() for process in self._processes]
            failed = [status for status in statuses if status]
            if failed or self._stop_requested:
                self._stop()
                first = failed[0] if failed else 128 + signal.SIGTERM
                return 128 - first if first < 0 else first
            if all(status == 0 for status in statuses):
                return 0
            if self._save_requested:
                self._ask_ranks_to_save()
            time.sleep(POLL_S)

    def _ask_ranks_to_save(self) -> None:
        """See [Signals]. Each rank once; called again and again: it may only now be started."""
        if self._asked is None:
            self._asked = set()
            print(f"{self._host}: time is nearly over, asking ranks to save and end", flush=True)
        ask_ranks_to_save(self._processes, self._asked)

    def _stop(self) -> None:
        """End what still runs: torchrun passes SIGTERM on, and SIGKILL after 30 s."""
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.terminate()
        give_up_at = time.monotonic() + STOP_DEADLINE_S
        for process in running:
            try:
                process.wait(max(0.1, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _print_tail(self) -> None:
        """Of the rank whose output was written first among those that hold an error."""
        paths = [
            self._logs / log_name(agent.first_rank + local, self._host)
            for _, agent in self._agents
            for local in range(agent.num_ranks)
        ]
        told = tail_with_error(paths)
        print(told or f"{self._host}: the output of its ranks is in {self._logs}", flush=True)


def ask_ranks_to_save(agents: Iterable[subprocess.Popen[bytes]], asked: set[int]) -> None:
    """SIGTERM to the ranks of these agents, and not to the agents, which would end them.

    Args:
        agents: running or not.
        asked: process ids of the ranks that have had it; each gets it once.
    """
    import psutil

    for agent in agents:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(agent.pid).children():
                with contextlib.suppress(psutil.Error):
                    if child.pid not in asked and "RANK" in child.environ():
                        child.terminate()
                        asked.add(child.pid)


def tail_with_error(paths: Sequence[Path]) -> str | None:
    """The end of the first of these files that speaks of an error."""
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_NBYTES))
                lines = file.read(_TAIL_NBYTES).decode(errors="replace").splitlines()
        except OSError:
            continue
        if any("Error" in line or "error" in line for line in lines[-200:]):
            tail = "\n".join(f"  {line}" for line in lines[-TAIL_NUM_LINES:])
            return f"last lines of {path}:\n{tail}"
    return None


def _ignore_save_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_descendants() -> None:
    """What ranks have left, such as the checkpoint writers of one that was killed."""
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=POLL_S)
