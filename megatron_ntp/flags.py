"""`megatron-ntp flags`: the flags as a table, printed, or put into documents between markers.

The table is made from the dataclasses of `settings`; README.md and docs/flags.md hold it as it is
printed here. So does docs/limits.md the table of Megatron's flags that are refused, made from
`integration.refusals`. A test compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any

from megatron_ntp.integration.refusals import REFUSALS
from megatron_ntp.settings import declared_fields, flag_name

BEGIN = "<!-- {}:begin -->"
END = "<!-- {}:end -->"


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
        help="put the table into these documents instead, between "
        f"{BEGIN.format('flags')} and {END.format('flags')}; and, where there are such lines with "
        "'refused', the flags of Megatron that --ntp refuses",
    )
    options = parser.parse_args(argv)
    if not options.update:
        print(table())
    for path in options.update:
        try:
            text = path.read_text(encoding="utf-8")
            new = with_tables(text)
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


def refused_table() -> str:
    """Every flag of Megatron that is refused, by reason, in Markdown."""
    flags_of: dict[str, list[str]] = {}
    for row in REFUSALS:
        flags_of.setdefault(row.why, []).append(f"`{row.flag}`")
    lines = ["| refused with `--ntp` | why |", "| --- | --- |"]
    return "\n".join(lines + [f"| {', '.join(own)} | {why} |" for why, own in flags_of.items()])


def with_tables(text: str) -> str:
    """A document with the present tables between their markers. Raises ValueError without any."""
    found = False
    for name, made in (("flags", table), ("refused", refused_table)):
        begin, end = BEGIN.format(name), END.format(name)
        before, first, rest = text.partition(begin)
        _, last, after = rest.partition(end)
        if first and last:
            found = True
            text = f"{before}{begin}\n{made()}\n{end}{after}"
    if not found:
        begin, end = BEGIN.format("flags"), END.format("flags")
        raise ValueError(f"has no lines {begin} and {end}, between which the table would go")
    return text


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
