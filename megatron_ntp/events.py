"""The log of a job's events: one JSON object per line, from which `megatron-ntp report` tells.

Supervisors of all nodes and ranks append to one file. Each line is one write in append mode, so
lines of several writers do not mix on a local or parallel file system; a writer that is killed in
between leaves at most one torn line, and the next writer starts a new one.

What `report` looks for, where it is known (seconds end in `_s`; a step, or iteration, is the number
of steps that the job has completed; -1 is none; every event may have more fields). By supervisors:

    supervisor-started
    health, decision
    attempt-started     attempt, degrees, digest, checkpoint, health_s, planning_s
    first-step          attempt, step, start_s, load_s, first_step_s    (of the slowest rank)
    step-progress       attempt, step, checkpoint
    fault-detected      attempt, reason, detection_s    (from the last sign of any rank)
    attempt-ended       attempt, reason, status, step, checkpoint, steps_lost, stop_s
    stopped, finished   status, reason

By ranks, as they happen:

    stepping            iteration    (rank 0 has completed its first step)
    trained             iteration    (Megatron's loop has returned in rank 0)
    faults-armed        faults
    fault-injected      fault, rank, moment, iteration
"""

from __future__ import annotations

import json
import os
import warnings
from datetime import UTC, datetime
from typing import Any

from megatron_ntp.environment import EVENTS_ENV

ENV = EVENTS_ENV
"""Names the log to ranks, which note injected faults there. Set by the supervisor."""


class EventLog:
    """Appends to the log at `path`; its folder must be there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    def write(self, event: str, **fields: Any) -> None:
        """One line: `event`, the time in UTC, and `fields`, which JSON can hold.

        Raises:
            OSError: the log cannot be written.
        """
        line = {"time": now(), "event": event, **fields}
        data = json.dumps(line, allow_nan=False, default=os.fspath).encode() + b"\n"
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if _is_torn(file):
                data = b"\n" + data
            os.write(file, data)
        finally:
            os.close(file)

    def note(self, event: str, **fields: Any) -> None:
        """As `write`, by a job that goes on where the log cannot be written: its disk is full."""
        try:
            self.write(event, **fields)
        except OSError as error:
            print(f"{self.path} cannot be written: {error.strerror}: {event} {fields}", flush=True)


def now() -> str:
    """The time in UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All events of a log, in the order they were written.

    A torn line, which a killed writer leaves, is skipped with a warning.

    Raises:
        OSError: the log cannot be read.
    """
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            event = _parse(line)
            if event is None:
                warnings.warn(
                    f"{os.fspath(path)}:{number}: skipped a torn line of {len(line)} bytes",
                    stacklevel=2,
                )
            else:
                found.append(event)
    return found


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _is_torn(file: int) -> bool:
    """Whether the log ends in the middle of a line."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
