"""`megatron-ntp report PATH`: what became of a job, attempt by attempt, and its goodput.

Exit status: 0, also for a job that did not finish; 1 if a fault of --ntp-inject never happened in a
finished job; 2 if there is no log, or matplotlib is missing for --plot.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from megatron_ntp import events
from megatron_ntp.plan.topology import format_degrees
from megatron_ntp.report.attempts import UNFINISHED, Attempt, Report, report

LOG = "events.jsonl"
PENDING = 1
_TITLES = ("attempt", "degrees", "steps", "lost", "plan", "start", "load", "first step", "detect",
           "stop", "ended because")  # fmt: skip
_NUMBERS = slice(2, -1)


class LogError(Exception):
    """There is no log to report on."""


def main(argv: Sequence[str]) -> int:
    """The subcommand."""
    options = _parser().parse_args(argv)
    try:
        found = load(options.path)
        if options.plot is not None:
            from megatron_ntp.report.plot import draw

            draw(found, options.plot)
    except (LogError, ImportError, OSError) as error:
        print(f"megatron-ntp report: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.as_json(), indent=2) if options.json else text(found))
    is_over = found.outcome != UNFINISHED
    return PENDING if is_over and found.faults_pending else 0


def load(path: Path) -> Report:
    """The report of a log, or of the log in a job's folder. Raises LogError."""
    log = path / LOG if path.is_dir() else path
    if not log.is_file():
        inside = sorted(found.parent.name for found in path.glob(f"*/{LOG}"))
        hint = f"; there are jobs {', '.join(inside)} in it: give one" if inside else ""
        raise LogError(f"there is no log {log}{hint}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        noted = events.read(log)
    for warning in caught:
        print(f"megatron-ntp report: {warning.message}", file=sys.stderr)
    if not noted:
        raise LogError(f"{log} holds no event yet")
    return report(noted)


def text(found: Report) -> str:
    """The table and what is below it."""
    rows = [_TITLES, *(_cells(attempt) for attempt in found.attempts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        padded[_NUMBERS] = [
            cell.rjust(width) for cell, width in zip(row[_NUMBERS], widths[_NUMBERS], strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.append(
        "seconds: plan with the check of GPUs, first step with what is built before it, detect "
        "from the last sign of a rank"
    )
    lines += ["", *_summary(found)]
    return "\n".join(lines)


def _summary(found: Report) -> list[str]:
    lines = [f"{found.outcome}, {len(found.attempts)} attempts, {found.steps_lost} steps lost"]
    if found.goodput is not None:
        lines.append(
            f"goodput {found.goodput:.1%}: {found.num_useful_steps} steps that were not done "
            f"again, {found.useful_step_s:.1f} s of {found.wall_s:.1f} s between first and last "
            "event"
        )
    if found.faults_armed:
        total, fired = len(found.faults_armed), len(found.faults_fired)
        lines.append(f"injected faults: {fired} of {total} happened")
    lines += [f"WARNING: this fault has not happened: {fault}" for fault in found.faults_pending]
    return lines


def _cells(attempt: Attempt) -> tuple[str, ...]:
    steps = "-"
    if attempt.num_steps and attempt.resumed_at is not None:
        steps = f"{attempt.resumed_at + 1}-{attempt.reached}"
    reason = attempt.reason or ("running" if attempt.ended_s is None else "-")
    if attempt.status:
        reason += f" (status {attempt.status})"
    return (
        str(attempt.number),
        format_degrees(attempt.degrees) if attempt.degrees else "-",
        steps,
        str(attempt.steps_lost),
        _seconds(_sum(attempt.health_s, attempt.planning_s)),
        *map(_seconds, (attempt.start_s, attempt.load_s, attempt.first_step_s)),
        *map(_seconds, (attempt.detection_s, attempt.stop_s)),
        reason,
    )


def _sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp report",
        description="What became of a job that `megatron-ntp launch` kept: its attempts, why they "
        "ended, what was lost, and goodput, which is useful step time over wall time.",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="RUN_DIR/JOBID, or its events.jsonl"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw steps over time (matplotlib)"
    )
    return parser
