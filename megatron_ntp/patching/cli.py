"""`megatron-ntp patches`: print the catalog of run-time patches against the installed Megatron."""

import argparse
import importlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

from megatron_ntp.patching.registry import Registry
from megatron_ntp.patching.rows import Patch, RowStatus
from megatron_ntp.patching.versions import find_cores, read_core_version

CATALOG = "megatron_ntp.integration.catalog"

_HEADINGS = ("status", "target", "versions", "why")


def catalog_table(statuses: Iterable[RowStatus], width: int = 120) -> str:
    """The catalog as a table: status, target, tested versions and why, wrapped to `width`."""
    rows = [
        (
            row.status.value,
            row.patch.target,
            row.patch.versions or "all",
            row.patch.reason + (f" [{row.detail}]" if row.detail else ""),
        )
        for row in statuses
    ]
    narrow = [max(len(row[column]) for row in [_HEADINGS, *rows]) for column in range(3)]
    rest = max(30, width - sum(narrow) - 6)
    lines: list[str] = []
    for row in [_HEADINGS, *rows]:
        first, *more = textwrap.wrap(row[3], rest) or [""]
        cells = [row[column].ljust(narrow[column]) for column in range(3)]
        lines.append("  ".join([*cells, first]).rstrip())
        lines += [" " * (sum(narrow) + 6) + text for text in more]
    lines.insert(1, "-" * min(width, sum(narrow) + 6 + rest))
    return "\n".join(lines)


def catalog_json(version: str, statuses: Iterable[RowStatus]) -> str:
    """The catalog as JSON, for scripts."""
    rows = [
        {
            "name": row.patch.name,
            "target": row.patch.target,
            "kind": row.patch.kind,
            "versions": row.patch.versions,
            "reason": row.patch.reason,
            "status": row.status.value,
            "detail": row.detail,
        }
        for row in statuses
    ]
    return json.dumps({"version": version, "rows": rows}, indent=2)


def patches_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ntp patches`. Returns 0 if every row fits, else 1."""
    parser = argparse.ArgumentParser(
        prog="megatron-ntp patches",
        description="Print what megatron-ntp changes in Megatron at run time, and whether each "
        "change fits the installed version. Changes nothing.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    cores = find_cores()
    if not cores:
        print(
            "megatron-ntp patches: no megatron.core can be imported by this Python "
            f"({sys.executable}). Install megatron-core, or put a Megatron-LM checkout on "
            "PYTHONPATH.",
            file=sys.stderr,
        )
        return 1
    version = read_core_version(cores[0])
    rows: tuple[Patch, ...] = tuple(importlib.import_module(CATALOG).ROWS)
    statuses = Registry("megatron", version, rows).check()
    if options.json:
        print(catalog_json(version, statuses))
    else:
        print(f"megatron-core {version} in {cores[0]}")
        print(catalog_table(statuses, shutil.get_terminal_size((120, 24)).columns))
    return 0 if all(row.status.good for row in statuses) else 1
