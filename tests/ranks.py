"""Run a function, or a training script, on several CPU ranks, quickly.

    results = run_ranks(my_function, world_size=4, degree=2)     # my_function(degree=2) in each
    training = run_training(["--train-iters", "5", ...], world_size=4)
    training.losses[5], training.stdout[3]

Ranks are forked from a process that has imported Megatron already (zygote.py), kept for the whole
test session: a start costs seconds once, then milliseconds. Results come back in rank order. If a
rank fails, or time runs out, every rank is killed and ``RanksFailed`` carries what each one wrote.
No port is fixed: a job's ranks meet in a store of its own.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zygote import load_function, read_message, write_message

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
_TAIL_NUM_LINES = 40

_ITERATION = re.compile(
    r"iteration\s+(?P<step>\d+)/.*?lm loss: (?P<loss>\S+) .*?grad norm: (?P<norm>\S+)"
)


class RanksFailed(AssertionError):
    """A rank failed, was killed, or did not end in time. Has ``statuses`` and ``outputs``."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Run:
    """How the ranks of a job ended, in rank order.

    A status is an exit code, negative for the signal that ended the rank, and None for a rank
    that this harness killed. A result is None where the status is not 0.
    """

    statuses: list[int | None]
    results: list[Any]
    stdout: list[str]
    stderr: list[str]

    @property
    def passed(self) -> bool:
        """Whether every rank ended by itself with status 0."""
        return all(status == 0 for status in self.statuses)

    def describe(self) -> str:
        """Statuses, and the last lines of every rank that did not pass."""
        parts = [f"statuses by rank: {self.statuses}"]
        for rank, status in enumerate(self.statuses):
            if status != 0:
                tail = self.stderr[rank].splitlines()[-_TAIL_NUM_LINES:]
                ending = "killed by the harness" if status is None else f"status {status}"
                parts += [f"--- rank {rank}: {ending}", *tail]
        return "\n".join(parts)


@dataclass(frozen=True)
class Training(Run):
    """A run of a training script, with what its last rank logged for each step."""

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)


class Zygote:
    """The process that forks ranks, for one version of Megatron."""

    def __init__(self, core: str | None) -> None:
        self._core = core
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [self._core] if self._core else []
        paths += [str(ROOT), str(ROOT / "tests")]
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join(paths),
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
            OPENBLAS_NUM_THREADS="1",
            TORCHDYNAMO_DISABLE="1",
            GLOO_SOCKET_IFNAME="lo",
            PYTHONWARNINGS="ignore",
        )
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
        )
        atexit.register(self.close)
        self._process = process
        self._receive()
        return process

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        reply = read_message(self._process.stdout)
        if reply is None:
            status = self._process.wait()
            self._process = None
            raise RuntimeError(f"the zygote for {self._core or 'megatron'} ended with {status}")
        if "error" in reply:
            raise RuntimeError(f"the zygote could not run a job:\n{reply['error']}")
        return reply

    def run(self, job: dict[str, Any]) -> dict[int, int]:
        """Exit status by rank; started on first use."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            write_message(process.stdin, job)
            return self._receive()["statuses"]
        except BaseException:  # a reply that comes later must not answer the next job
            process.terminate()
            self._process = None
            raise

    def close(self) -> None:
        """End the process; a later run starts a new one."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None


_zygotes: dict[str | None, Zygote] = {}


def run_ranks(
    function: Callable[..., Any] | str,
    world_size: int,
    *,
    core: str | os.PathLike[str] | None = None,
    timeout_s: float = 120.0,
    grace_s: float | None = 2.0,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    **arguments: Any,
) -> list[Any]:
    """Call a function on every rank, and return what each call returned.

    Args:
        function: A module-level function, or its name as ``module:function``.
        world_size: Number of ranks. RANK, WORLD_SIZE, LOCAL_RANK are set in each, and
            ``torch.distributed.init_process_group("gloo")`` finds the others.
        core: Folder with a ``megatron`` package to use in place of the installed one.
        timeout_s: When to kill all ranks.
        grace_s: How long the others go on after a first failure. None: until ``timeout_s``.
        environment: Variables to set in the ranks.
        check: Raise ``RanksFailed`` unless all ranks pass. For a job whose ranks are meant to
            fail, use ``start`` to get the statuses.
        arguments: Passed to the function by name; pickled.
    """
    run = start(function, world_size, core, timeout_s, grace_s, environment, arguments)
    if check and not run.passed:
        raise RanksFailed(run.describe(), run)
    return run.results


def start(
    function: Callable[..., Any] | str,
    world_size: int,
    core: str | os.PathLike[str] | None = None,
    timeout_s: float = 120.0,
    grace_s: float | None = 2.0,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Run:
    """Like ``run_ranks``, but failing ranks are not an error: how each ended is the answer."""
    key = os.fspath(core) if core is not None else None
    zygote = _zygotes.setdefault(key, Zygote(key))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        statuses = zygote.run(
            {
                "function": _target(function),
                "arguments": dict(arguments or {}),
                "world_size": world_size,
                "timeout_s": timeout_s,
                "grace_s": grace_s,
                "environment": dict(environment or {}),
                "folder": folder,
            }
        )
        return _collect(Path(folder), world_size, statuses)


def _target(function: Callable[..., Any] | str) -> dict[str, str]:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return {"module": module, "name": name, "file": ""}
    path = inspect.getsourcefile(function)
    assert path is not None
    return {"module": function.__module__, "name": function.__qualname__, "file": path}


def _collect(folder: Path, world_size: int, statuses: Mapping[int, int]) -> Run:
    def text(rank: int, suffix: str) -> str:
        path = folder / f"{rank}.{suffix}"
        return path.read_text(errors="replace") if path.exists() else ""

    ranks = range(world_size)
    results = [folder / f"{rank}.result" for rank in ranks]
    return Run(
        statuses=[statuses.get(rank) for rank in ranks],
        results=[pickle.loads(path.read_bytes()) if path.exists() else None for path in results],
        stdout=[text(rank, "out") for rank in ranks],
        stderr=[text(rank, "err") for rank in ranks],
    )


def free_port() -> int:
    """A port of this host that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_training(
    argv: Sequence[str],
    world_size: int,
    *,
    script: str | os.PathLike[str] = SCRIPT,
    core: str | os.PathLike[str] | None = None,
    timeout_s: float = 180.0,
    grace_s: float | None = 2.0,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Training:
    """Run ``megatron-ntp run --cpu SCRIPT ARGV`` on every rank.

    Args:
        argv: The script's flags, ``--ntp`` and its kin among them.
        world_size: Number of ranks.
        script: The training script. One of a Megatron-LM checkout needs it as ``core``, too.
        before: Module-level function called in each rank before the script starts, with
            ``arguments``: the place to set up observers and faults.
        after: Module-level function called when the script has ended, with ``arguments``. What it
            returns is the rank's result.

    The other arguments are those of ``run_ranks``. ``check=False`` returns failed runs.
    """
    run = start(
        train,
        world_size,
        core,
        timeout_s,
        grace_s,
        environment,
        {
            "argv": [str(word) for word in argv],
            "script": os.fspath(script),
            "before": before and _target(before),
            "after": after and _target(after),
            "arguments": arguments,
        },
    )
    if check and not run.passed:
        raise RanksFailed(run.describe(), run)
    lines = [match.groupdict() for match in _ITERATION.finditer(run.stdout[-1])]
    return Training(
        **vars(run),
        losses={int(line["step"]): float(line["loss"]) for line in lines},
        grad_norms={int(line["step"]): float(line["norm"]) for line in lines},
    )


def train(
    argv: list[str],
    script: str,
    before: dict[str, str] | None,
    after: dict[str, str] | None,
    arguments: dict[str, Any],
) -> Any:
    """What a rank of ``run_training`` runs."""
    from megatron_ntp.integration.preload import start_result_queue
    from megatron_ntp.launch import run
    from megatron_ntp.rehearsal.processes import die_with_parent

    if "--save" in argv:
        # Megatron would start this server as a new Python that imports everything once more.
        start_result_queue(functools.partial(die_with_parent, os.getpid()))
    if before is not None:
        load_function(before)(**arguments)
    try:
        status: Any = run(["--cpu", script, *argv])
    except SystemExit as exit_request:  # how Megatron ends at --exit-interval
        status = exit_request.code
    if status:
        sys.exit(status)
    return load_function(after)(**arguments) if after is not None else None
