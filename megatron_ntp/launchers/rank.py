"""One rank: output to a file of its own, then the training command in this very process.

    python -m megatron_ntp.launchers.rank FOLDER COMMAND...

torchrun starts it with RANK set. The process id stays, so that signals reach the training. Under a
supervisor it dies with its agent.
"""

from __future__ import annotations

import os
import sys

from megatron_ntp.launchers.check import this_host
from megatron_ntp.launchers.parent import die_with_parent

AGENT_PID_ENV = "MEGATRON_NTP_AGENT_PID"
"""The agent that ranks die with. Set by the agent of a supervisor (`supervisor.agent`)."""


def log_name(rank: int, host: str) -> str:
    """Of a rank's output, inside an attempt's folder."""
    return f"rank-{rank:05d}.{host}.log"


def main(argv: list[str]) -> None:
    """Does not return."""
    folder, *command = argv
    agent_pid = os.environ.pop(AGENT_PID_ENV, None)
    if agent_pid is not None:
        die_with_parent(int(agent_pid))
    path = os.path.join(folder, log_name(int(os.environ["RANK"]), this_host(os.environ)))
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
