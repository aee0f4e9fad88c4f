"""`megatron-ntp flags`: the flags as a table, printed, or put into documents between markers.

The table is made from the dataclasses of `settings`; README.md and docs/flags.md hold it as it is
printed here, and a test compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from megatron_ntp.settings import declared_fields, flag_name

BEGIN = "<!-- flags:begin -->"
END = "<!-- flags:end -->"


def flags(argv: Sequence[str]) -> int:
    """The subcommand. Returns 1 where a document lacks the markers."""
    parser = argparse.ArgumentParser(
        prog="megatron-ntp flags",
        description="Print the flags as a Markdown table.",
    )
    parser.add_argument(
        "--update",
        metavar="FILE",
        nargs="+",
        type=Path,
        default=[],
        help=f"put the table into these documents instead, between {BEGIN} and {END}",
    )
    options = parser.parse_args(argv)
    if not options.update:
        print(table())
    for path in options.update:
        try:
            text = path.read_text(encoding="utf-8")
            new = with_table(text)
        except (OSError, ValueError) as error:
            print(f"megatron-ntp flags: {path}: {error}", file=sys.stderr)
            return 1
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"updated {path}")
    return 0


def table() -> str:
    """Every flag with its value, default and meaning, in Markdown."""
    lines = ["| flag | value | default | what it does |", "| --- | --- | --- | --- |"]
    for setting in declared_fields():
        cells = (f"`{flag_name(setting.name)}`", _value(setting), _default(setting), _help(setting))
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """A document with the present table between its markers. Raises ValueError without them."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"has no lines {BEGIN} and {END}, between which the table would go")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _value(setting: Field[Any]) -> str:
    argument = setting.metadata["argument"]
    if "choices" in argument:
        return ", ".join(f"`{choice}`" for choice in argument["choices"])
    return f"`{argument['metavar']}`" if "metavar" in argument else ""


def _default(setting: Field[Any]) -> str:
    if setting.default is None:
        return ""
    if setting.default is False:
        return "off"
    return f"`{setting.default}`"


def _help(setting: Field[Any]) -> str:
    return setting.metadata["help"]
