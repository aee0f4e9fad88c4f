"""Starts the ranks of a job as processes, follows them, kills them; leaves none behind.

A rank runs `megatron-ntp run` with the environment that torchrun would give it. Two ways to start
one, which differ in nothing that a rank can see:

- cold: a new Python, as torchrun does. Importing torch and Megatron costs each rank seconds.
- warm: a fork of this process after it has imported them (`warm`), so that all ranks pay once.

The ranks meet in a store kept by one more process, as under torchrun, so that any of them may die.
Each leads a process group of its own, which goes as a whole, and the kernel kills whatever is left
when this process dies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from megatron_ntp.errors import NTPError
from megatron_ntp.launchers.parent import die_with_parent

ADDRESS = "127.0.0.1"
STORE_WAIT_S = 60.0
TERM_WAIT_S = 1.0
TAIL_NUM_LINES = 25
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # a rehearsal runs on CPU, also where there are GPUs
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
}
"""Set in this process before anything is imported; ranks inherit it."""

Starter = Callable[[Sequence[str], Mapping[str, str], Path], int]
"""(words after `megatron-ntp`, variables to set, log file) -> process id."""


class RankFailedError(NTPError):
    """A rank ended with an error, or did not end in time."""


def own_group(parent_pid: int) -> None:
    """Called in a new child: Ctrl-C is not for it, and it must not outlive its parent."""
    os.setpgid(0, 0)
    die_with_parent(parent_pid)


def start_cold(words: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """A `Starter`: a new Python."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_ntp", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            preexec_fn=functools.partial(own_group, os.getpid()),
        )
    process.returncode = 0  # waited for by Job: keeps Popen's finalizer from doing so as well
    return process.pid


def _keep_store(port_writer: int, parent_pid: int) -> NoReturn:
    """In a fork: holds the store until killed, after writing the port it was given."""
    try:
        own_group(parent_pid)
        from torch.distributed import TCPStore

        store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        os.write(port_writer, str(store.port).encode())
        os.close(port_writer)
        while True:
            signal.pause()
    finally:
        os._exit(1)


def _start_store() -> tuple[int, int]:
    """Process id and port of a store for one job."""
    reader, writer = os.pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _keep_store(writer, parent_pid)
    os.close(writer)
    port = os.read(reader, 16) if wait([reader], STORE_WAIT_S) else b""
    os.close(reader)
    if not port:
        _end_group(pid)
        os.waitpid(pid, 0)
        raise RankFailedError(f"the job's rendezvous store did not open within {STORE_WAIT_S:g} s")
    return pid, int(port)


def _end_group(pid: int, sent: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):  # it may have ended
        os.killpg(pid, sent)


@dataclass
class Job:
    """The ranks of one job. Use it as a context manager: leaving it ends whatever still runs.

    Attributes:
        words: what each rank runs, after `megatron-ntp`.
        logs: folder for one file per rank.
        statuses: exit status by rank, negative for the signal that ended it; of ended ranks only.
    """

    words: Sequence[str]
    world_size: int
    logs: Path
    starter: Starter
    statuses: dict[int, int] = field(default_factory=dict)
    _pids: dict[int, int] = field(default_factory=dict)
    _store_pid: int | None = None

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            self._store_pid, port = _start_store()
            for rank in range(self.world_size):
                environment = self._environment(rank, port)
                self._pids[rank] = self.starter(self.words, environment, self.log(rank))
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": ADDRESS,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is not one of the ranks' own
        }

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank:02d}.log"

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._pids if rank not in self.statuses)

    def poll(self) -> None:
        """Notes which ranks have ended."""
        for rank in self.running:
            done, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if done:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)

    def check(self) -> None:
        """Raises RankFailedError, with the end of its log, if a rank has ended with an error."""
        self.poll()
        bad = [rank for rank, status in self.statuses.items() if status != 0]
        if bad:
            raise RankFailedError(self._describe(bad))

    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL, and wait until the ranks are gone."""
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGKILL)
        while not set(ranks) <= set(self.statuses):
            self.poll()
            time.sleep(0.005)

    def end(self) -> None:
        """Ends every rank, with what it has started, and the store."""
        for sent, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, None)):
            for rank, pid in self._pids.items():
                if sent is signal.SIGKILL or rank not in self.statuses:
                    _end_group(pid, sent)
            self._wait(wait_s)
        if self._store_pid is not None:
            _end_group(self._store_pid)
            os.waitpid(self._store_pid, 0)
            self._store_pid = None

    def _wait(self, wait_s: float | None) -> None:
        deadline = None if wait_s is None else time.monotonic() + wait_s
        while self.running and (deadline is None or time.monotonic() < deadline):
            self.poll()
            time.sleep(0.005)

    def stuck(self, why: str) -> RankFailedError:
        """The error for a job that takes too long."""
        return RankFailedError(f"{why}; still running: ranks {_listed(self.running)}")

    def _describe(self, bad: Sequence[int]) -> str:
        # Ranks that lost their peer fail too. One that a signal ended was not their victim.
        first = min(bad, key=lambda rank: (self.statuses[rank] > 0, bad.index(rank)))
        status = self.statuses[first]
        ending = f"exit status {status}"
        if status < 0:
            ending = f"killed by {signal.Signals(-status).name}"
        log = self.log(first)
        tail = (
            log.read_text(errors="replace").splitlines()[-TAIL_NUM_LINES:] if log.exists() else []
        )
        others = sorted(rank for rank in bad if rank != first)
        also = f"; ranks {_listed(others)} failed as well" if others else ""
        head = f"rank {first} of {self.world_size} failed ({ending}){also}. The end of {log}:"
        return "\n".join([head, *(f"  | {line}" for line in tail)])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"
