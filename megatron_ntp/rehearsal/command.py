"""`megatron-ntp rehearse`: the options, the order of things, and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_ntp.errors import NTPError, PlanError
from megatron_ntp.plan import BATCH_POLICIES, parse_degrees, parse_failed
from megatron_ntp.rehearsal import folder, parity, plot, processes, report, warm
from megatron_ntp.rehearsal.job import Options, RehearsalError
from megatron_ntp.rehearsal.progress import Progress
from megatron_ntp.rehearsal.story import Outcome, Story

PASSED, PARITY_BROKEN, USAGE, RUN_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

EXIT_STATUSES = (
    "exit status: 0 the losses agree, 1 they do not, 2 wrong usage, 3 a rank failed or took too "
    "long (the end of its log is printed), 130 interrupted"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ntp rehearse",
        description="Train a small Llama-like model with Megatron on CPU processes, kill a rank, "
        "carry on at a reduced degree from the checkpoint, go back to the full degree, and compare "
        "every loss with a job that nothing happened to.",
        epilog=EXIT_STATUSES,
        allow_abbrev=False,
    )
    default = Options()
    add = parser.add_argument
    add(
        "--degrees",
        default="4,3",
        metavar="N,N,...",
        help="TP degree of each replica after the "
        "failure; the highest is the healthy degree (default 4,3)",
    )
    add(
        "--failed",
        metavar="R:S[,...]",
        help="the slots that fail, as replica:slot; must leave "
        "the degrees (default: the last slots of the reduced replicas)",
    )
    add(
        "--heads",
        type=int,
        default=default.num_heads,
        metavar="N",
        help="attention heads (default %(default)s)",
    )
    add(
        "--steps",
        type=int,
        default=default.num_steps,
        metavar="N",
        help="steps in all (default %(default)s)",
    )
    add(
        "--save-interval",
        type=int,
        metavar="N",
        help="steps between checkpoints, also how long "
        "the reduced job runs (default: a third of the steps)",
    )
    add(
        "--fail-at",
        type=int,
        metavar="STEP",
        help="the step in which the ranks are killed "
        "(default: half way between the first two checkpoints)",
    )
    add(
        "--microbatches",
        type=int,
        default=default.num_microbatches,
        metavar="N",
        help="microbatches per replica and step of the healthy job (default %(default)s)",
    )
    add(
        "--policy",
        choices=BATCH_POLICIES,
        default=default.batch_policy,
        help="microbatches of a reduced replica (default %(default)s)",
    )
    add(
        "--tolerance",
        type=float,
        default=parity.DEFAULT_TOLERANCE,
        metavar="X",
        help="largest relative difference of a loss (default %(default)g)",
    )
    add(
        "--output",
        type=Path,
        default=Path("build"),
        metavar="DIR",
        help="where rehearsal.png, "
        "rehearsal.json and the folder rehearsal/ go (default %(default)s)",
    )
    add(
        "--cold",
        action="store_true",
        help="start every rank as a new Python, as torchrun does, "
        "in place of a fork that has Megatron imported; takes minutes longer",
    )
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="longest that one phase may take, in seconds (default %(default)g)",
    )
    return parser


def options_from(given: argparse.Namespace) -> Options:
    """The options of a rehearsal. Raises PlanError where they do not make one."""
    interval = max(1, given.steps // 3) if given.save_interval is None else given.save_interval
    fail_at = interval + max(1, (interval + 1) // 2) if given.fail_at is None else given.fail_at
    if not 0 <= given.tolerance < float("inf"):
        raise RehearsalError(f"--tolerance must be a number of at least 0, got {given.tolerance}")
    return Options(
        degrees=parse_degrees(given.degrees),
        failed=None if given.failed is None else parse_failed(given.failed),
        num_heads=given.heads,
        num_steps=given.steps,
        save_interval=interval,
        fail_at=fail_at,
        num_microbatches=given.microbatches,
        batch_policy=given.policy,
    )


def main(argv: Sequence[str]) -> int:
    """The subcommand. Returns one of the exit statuses above."""
    given = _parser().parse_args(argv)
    progress = Progress(sys.stdout)
    try:
        options = options_from(given)
        with folder.claimed(given.output) as outputs:
            return _rehearse(given, options, outputs, progress)
    except PlanError:
        raise  # `cli.main` prints it and returns USAGE
    except NTPError as error:
        progress.clear()
        print(f"megatron-ntp rehearse: {error}", file=sys.stderr)
        return RUN_FAILED
    except KeyboardInterrupt:
        progress.clear()
        print("megatron-ntp rehearse: interrupted; every rank has been ended", file=sys.stderr)
        return INTERRUPTED


def _rehearse(
    given: argparse.Namespace, options: Options, outputs: folder.Outputs, progress: Progress
) -> int:
    started_s = time.monotonic()
    os.environ.update(processes.ENVIRONMENT)
    seconds: dict[str, float] = {}
    if not given.cold:
        progress.begin("importing torch and Megatron once for all ranks")
        warm.prepare(outputs.work / "imports.log")
        seconds["imports"] = progress.end()
    starter = processes.start_cold if given.cold else warm.start_warm
    outcome = Story(options, outputs.work, starter, progress, given.timeout).run()
    seconds |= {record.phase.name: record.seconds for record in outcome.records}
    seconds["total"] = time.monotonic() - started_s
    return _tell(outcome, outputs, given.tolerance, seconds)


def _tell(
    outcome: Outcome, outputs: folder.Outputs, tolerance: float, seconds: dict[str, float]
) -> int:
    compared = parity.compare(
        outcome.undisturbed.losses, outcome.ntp_losses, outcome.options.num_steps, tolerance
    )
    print(f"\n{report.as_text(outcome, compared)}\n")
    result = report.as_json(outcome, compared, {k: round(v, 2) for k, v in seconds.items()})
    outputs.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    written = [outputs.results]
    try:
        plot.draw(outcome, compared, outputs.picture)
        written.append(outputs.picture)
    except plot.PlotMissingError as missing:
        print(missing)
    print(report.verdict(compared))
    print(f"{seconds['total']:.0f} s; wrote {' and '.join(map(str, written))}")
    return PASSED if compared.holds else PARITY_BROKEN
