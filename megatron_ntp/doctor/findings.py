"""What the checks of the doctor say."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How a finding bears on a run with --ntp."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the table. `cure` says what to change, where something is to be changed."""

    subject: str
    verdict: Verdict
    what: str
    cure: str = ""


def ok(subject: str, what: str) -> Finding:
    """In order."""
    return Finding(subject, Verdict.OK, what)


def note(subject: str, what: str, cure: str = "") -> Finding:
    """Good to know; no more."""
    return Finding(subject, Verdict.NOTE, what, cure)


def warn(subject: str, what: str, cure: str = "") -> Finding:
    """Works, perhaps not as wished."""
    return Finding(subject, Verdict.WARN, what, cure)


def fail(subject: str, what: str, cure: str) -> Finding:
    """Will not work before the cure."""
    return Finding(subject, Verdict.FAIL, what, cure)


def passed(findings: Sequence[Finding]) -> bool:
    """Whether a run with --ntp can be started."""
    return all(finding.verdict is not Verdict.FAIL for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """The last line: what all findings together mean."""
    count = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    if count[Verdict.FAIL]:
        return f"{count[Verdict.FAIL]} to repair before --ntp can run (FAIL above)"
    if count[Verdict.WARN]:
        return f"works, with {count[Verdict.WARN]} thing(s) to look at (warn above)"
    return "all in order"


def as_table(findings: Sequence[Finding], width: int = 100) -> str:
    """The findings with what to change below each."""
    first = max(len(finding.subject) for finding in findings)
    second = max(len(verdict) for verdict in Verdict)
    indent = " " * (first + second + 4)
    lines: list[str] = []
    for finding in findings:
        head = f"{finding.subject:<{first}}  {finding.verdict:<{second}}  "
        lines += _wrapped(finding.what, head, indent, width)
        if finding.cure:
            lines += _wrapped(finding.cure, indent + "-> ", indent + "   ", width)
    return "\n".join([*lines, "", summary(findings)])


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    lines: list[str] = []
    for part in text.splitlines() or [""]:
        lines += textwrap.wrap(
            part,
            max(width, len(rest) + 40),
            initial_indent=rest if lines else first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [first.rstrip()]
    return lines


def as_json(findings: Sequence[Finding]) -> str:
    """The findings for scripts."""
    rows = [
        {
            "subject": finding.subject,
            "verdict": finding.verdict.value.lower(),
            "what": finding.what,
            "cure": finding.cure,
        }
        for finding in findings
    ]
    return json.dumps({"works": passed(findings), "findings": rows}, indent=2)
