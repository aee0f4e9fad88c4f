"""One rank: output to a file of its own, then the training command in this very process.

    python -m megatron_ntp.launchers.rank FOLDER COMMAND...

torchrun starts it with RANK set. The process id stays, so that signals reach the training.
"""

from __future__ import annotations

import os
import sys

from megatron_ntp.launchers.check import this_host


def log_name(rank: int, host: str) -> str:
    """Of a rank's output, inside an attempt's folder."""
    return f"rank-{rank:05d}.{host}.log"


def main(argv: list[str]) -> None:
    """Does not return."""
    folder, *command = argv
    path = os.path.join(folder, log_name(int(os.environ["RANK"]), this_host(os.environ)))
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
