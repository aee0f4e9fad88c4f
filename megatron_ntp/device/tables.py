"""Rows for a terminal or for a program: the same content as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "-"


def watts(limit_mw: int | None) -> float | None:
    """Milliwatts as people read them."""
    return None if limit_mw is None else limit_mw / 1000


def render(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], notes: Sequence[str]) -> str:
    """A table with one line per row, and what is to be said about it below."""
    texts = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [list(columns), *texts]
    ]
    return "\n".join([*lines, *notes])


def show(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    as_json: bool,
    notes: Sequence[str] = (),
    **extra: Any,
) -> None:
    """Prints rows; as JSON with every key they have, as a table with the columns that are named."""
    if as_json:
        print(json.dumps({**extra, "rows": list(rows), "notes": list(notes)}, indent=2))
    else:
        print(render(rows, columns, notes))


def _cell(value: Any) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or MISSING
    return str(value)
