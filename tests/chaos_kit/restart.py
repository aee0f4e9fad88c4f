"""Time from SIGKILL of a rank to the next step that is complete: ours, and plain Megatron's.

Both jobs are uniform, one replica at TP 2, on the same machine, one after the other: plain Megatron
under torchrun, which is started again as soon as it has ended, as a loop in a batch script does;
and the same flags with --ntp under `megatron-ntp launch`. A rank is killed between two checkpoints,
so that the first step after it has been logged before; both times are read from the logs of losses
by the same eye.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from supervised import Job, Supervisor

from chaos_kit.job import ROOT, SAVE_EVERY, TP, Reference, flags, logged, run_words
from chaos_kit.rounds import HOST, POLL_S, launch_words
from megatron_ntp.rehearsal.processes import ENVIRONMENT

DEADLINE_S = 170.0
KILL_AFTER = 2 * SAVE_EVERY + 2
NUM_RANKS = TP  # few, so that the cores of a small machine are not what is measured
KILLED_RANK = 1
_PARTS = ("start_s", "load_s", "first_step_s")


def ours(folder: Path, reference: Reference) -> dict[str, Any]:
    """`megatron-ntp launch`: seconds in all, and in parts as its events tell."""
    _lay_out(folder, reference)
    train = ["-m", "megatron_ntp", *run_words(Path("losses.jsonl"), _flags()), "--ntp"]
    supervisor = Supervisor(folder, launch_words(NUM_RANKS), " ".join(train), _environ())
    job = Job(folder)
    try:
        _wait_until_stepped(folder)
        killed_at = _kill(job.pid(KILLED_RANK))
        total_s = _wait(folder, _is_stepping_again) - killed_at
        step = job.wait_for("first-step", 2, 10)
        ended = job.wait_for("attempt-ended", 1, 1)
        started = job.wait_for("attempt-started", 2, 1)
    finally:
        supervisor.kill()
        _end(folder)
    parts = {name.removesuffix("_s"): step[name] for name in _PARTS}
    parts |= {"stop": ended["stop_s"], "health": started["health_s"]}
    parts["detection"] = total_s - sum(parts.values())  # and what is between the others
    return {"total_s": round(total_s, 3), **{k: round(v, 3) for k, v in parts.items()}}


def plain(folder: Path, reference: Reference) -> dict[str, Any]:
    """torchrun and plain Megatron: seconds in all, and those until torchrun had ended."""
    _lay_out(folder, reference)
    torchrun = _torchrun(folder)
    try:
        _wait_until_stepped(folder)
        killed_at = _kill(_rank_below(torchrun.pid))
        torchrun.wait(DEADLINE_S)
        stop_s = time.monotonic() - killed_at
        torchrun = _torchrun(folder)
        total_s = _wait(folder, _is_stepping_again) - killed_at
    finally:
        torchrun.kill()
        torchrun.wait()
        _end(folder)
    return {"total_s": round(total_s, 3), "stop": round(stop_s, 3)}


def _torchrun(folder: Path) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(NUM_RANKS)),
        *("-m", "megatron_ntp", *run_words(Path("losses.jsonl"), _flags())),
    ]
    with (folder / "torchrun.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=_environ(), stdout=log, stderr=log, start_new_session=True
        )


def _lay_out(folder: Path, reference: Reference) -> None:
    folder.mkdir(parents=True)
    shutil.copytree(reference.start, folder / "ckpt")


def _flags() -> list[str]:
    return flags(TP, Path("ckpt"))


def _environ() -> dict[str, str]:
    found = {**os.environ, **ENVIRONMENT, "SLURMD_NODENAME": HOST, "PYTHONPATH": str(ROOT)}
    del found["CUDA_VISIBLE_DEVICES"]
    return found


def _wait_until_stepped(folder: Path) -> None:
    _wait(folder, lambda steps: bool(steps) and steps[-1] >= KILL_AFTER)


def _is_stepping_again(steps: list[int]) -> bool:
    return len(set(steps)) < len(steps)


def _kill(pid: int) -> float:
    """Returns when."""
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return killed_at


def _wait(folder: Path, is_there: Callable[[list[int]], bool]) -> float:
    """Until what is asked of the logged steps is so; returns when."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_there([step for step, _ in logged(folder / "losses.jsonl")]):
        assert time.monotonic() < give_up_at, f"no step within {DEADLINE_S:g} s, see {folder}"
        time.sleep(POLL_S)
    return time.monotonic()


def _rank_below(pid: int) -> int:
    """The process of the rank to kill."""
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(KILLED_RANK):
                return process.pid
    raise AssertionError(f"torchrun has no process of rank {KILLED_RANK}")


def _end(folder: Path) -> None:
    """Kills what still runs in this folder."""
    for process in Job(folder).processes():
        with contextlib.suppress(psutil.Error):
            process.kill()
