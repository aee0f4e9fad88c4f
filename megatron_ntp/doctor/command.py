"""`megatron-ntp doctor [PATH] [-- FLAGS]`. Exit status: 0 works, 1 does not, 2 wrong usage."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from megatron_ntp.doctor.findings import Finding, as_json, as_table, passed
from megatron_ntp.doctor.job import check_flags
from megatron_ntp.doctor.machine import check_machine
from megatron_ntp.doctor.megatron import check_megatron
from megatron_ntp.doctor.software import check_software


def doctor(argv: Sequence[str]) -> int:
    """The subcommand."""
    words = list(argv)
    flags: list[str] | None = None
    if "--" in words:
        place = words.index("--")
        words, flags = words[:place], words[place + 1 :]
    parser = argparse.ArgumentParser(
        prog="megatron-ntp doctor",
        usage="megatron-ntp doctor [--json] [PATH] [-- SCRIPT.py FLAGS]",
        description="Say whether this machine, its software, a Megatron and a job's flags will "
        "work with nonuniform tensor parallelism, and what to change. Changes nothing.",
        epilog="Exit status: 0 it will work, 1 something must be changed first, 2 wrong usage.",
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        type=Path,
        help="a Megatron-LM checkout; without it the megatron-core that this Python imports",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(words)
    findings = examine(options.path, flags)
    width = shutil.get_terminal_size((100, 24)).columns
    print(as_json(findings) if options.json else as_table(findings, width))
    return 0 if passed(findings) else 1


def examine(path: Path | None, flags: Sequence[str] | None) -> list[Finding]:
    """All findings, in the order of the table."""
    findings = [*check_machine(), *check_software(), *check_megatron(path)]
    return findings if flags is None else [*findings, *check_flags(flags)]
