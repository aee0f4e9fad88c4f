"""Runs the undisturbed jobs of plain Megatron, in ranks forked from this process.

    python -m chaos_kit.reference FOLDER DEGREE,DEGREE,...

Started with `processes.ENVIRONMENT`: threads that an import starts would not survive a fork.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from chaos_kit.job import FIRST_STEP, LAST_STEP, NUM_REPLICAS, START_TP, TP, flags, run_words
from megatron_ntp.checkpoint.folder import TRACKER
from megatron_ntp.rehearsal import processes, warm

_DEADLINE_S = 240.0


def main(folder: Path, degrees: list[int]) -> None:
    """The job at TP 1, which leaves the start of all, then those of other degrees.

    That of TP 2 has two replicas, as the job that meets chaos.
    """
    warm.prepare(folder / "imports.log")
    _run(folder, START_TP, 1, [])
    start = folder / "start"
    name = f"iter_{FIRST_STEP:07d}"
    shutil.copytree(folder / f"tp{START_TP}" / name, start / name)
    (start / TRACKER).write_text(f"{FIRST_STEP}")
    for tp in degrees:
        if tp != START_TP:
            shutil.copytree(start, folder / f"tp{tp}")
            last_only = ["--save-interval", str(LAST_STEP)]
            _run(folder, tp, tp * (NUM_REPLICAS if tp == TP else 1), last_only)


def _run(folder: Path, tp: int, world_size: int, more: list[str]) -> None:
    name = f"tp{tp}"
    words = run_words(folder / f"{name}.losses", flags(tp, folder / name) + more)
    give_up_at = time.monotonic() + _DEADLINE_S
    with processes.Job(words, world_size, folder / f"{name}.logs", warm.start_warm) as job:
        while job.running:
            job.check()
            if time.monotonic() > give_up_at:
                raise job.stuck(f"plain Megatron at TP {tp} took over {_DEADLINE_S:g} s")
            time.sleep(0.02)
        job.check()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2].split(",")])
