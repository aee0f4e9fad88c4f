"""torch.distributed.elastic's agent as a supervisor starts it: one per run of consecutive ranks.

    python -m megatron_ntp.supervisor.agent REPORT GRACE_S SUPERVISOR_PID TORCHRUN-ARGUMENTS

It is `launchers.agent`, and moreover

- dies with its supervisor, as its ranks die with it;
- writes REPORT (JSON: rank, status, pid) as soon as a rank has failed. torch itself tells nobody
  before all other ranks are gone, which may take it half a minute;
- gives the other ranks GRACE_S seconds between SIGTERM and SIGKILL;
- minds no signal but STOP_SIGNAL. Schedulers send theirs to all processes of a job; what they mean
  is for supervisors. An agent that took SIGTERM for itself would end ranks that are still saving.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ntp.atomic import write_atomically
from megatron_ntp.launchers.parent import die_with_parent
from megatron_ntp.launchers.rank import AGENT_PID_ENV

STOP_SIGNAL = signal.SIGHUP
"""Ends an agent and its ranks; these get SIGTERM. Sent by the supervisor alone."""

NOT_FOR_AGENTS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Blocked while an agent is started, until it can leave them alone."""


def main(argv: list[str]) -> int:
    """Run the ranks of one agent to their end; the status of the rank that failed first."""
    report, grace_s, supervisor_pid, *torchrun = argv
    die_with_parent(int(supervisor_pid))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # ranks inherit that
    signal.signal(signal.SIGTERM, _leave_alone)  # they do not inherit this
    signal.signal(signal.SIGINT, _leave_alone)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_AGENTS)
    os.environ[AGENT_PID_ENV] = str(os.getpid())

    from megatron_ntp.launchers import agent

    _tell_first_failure(Path(report), max(1, round(float(grace_s))))
    _mind_only_the_supervisor()
    return agent.main(torchrun)


def _tell_first_failure(report: Path, grace_s: int) -> None:
    """Changes how torch ends ranks: see above. It calls `close` when it has seen one fail."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    close = PContext.close

    def close_and_tell(
        context: Any, death_sig: signal.Signals | None = None, timeout: int = grace_s
    ) -> None:
        failures = list(getattr(context, "_failures", {}).values())
        if failures and not report.exists():
            _write(report, context, failures)
        close(context, signal.SIGTERM, grace_s)

    PContext.close = close_and_tell


def _mind_only_the_supervisor() -> None:
    """As it starts ranks, torch takes over all signals that may end a process."""
    from torch.distributed.elastic.multiprocessing import api

    handler = api._terminate_process_handler

    def handle(number: int, frame: FrameType | None) -> None:
        if number == STOP_SIGNAL:
            handler(number, frame)

    api._terminate_process_handler = handle


def _leave_alone(number: int, frame: FrameType | None) -> None:
    pass


def _write(report: Path, context: Any, failures: list[Any]) -> None:
    found = [
        {
            "rank": int(context.envs[failure.local_rank]["RANK"]),
            "status": failure.exitcode,
            "pid": failure.pid,
        }
        for failure in failures
    ]
    write_atomically(report, json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
