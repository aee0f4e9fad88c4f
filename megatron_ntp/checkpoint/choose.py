"""Which checkpoint of a folder a job starts from: the newest whole one, unless someone said else.

[Set back] People rewind a job by writing an older iteration into the tracker. A checkpoint newer
than the tracker that was whole before the tracker was written is therefore passed over; one that
became whole afterwards was saved by a job that died before it could move the tracker, and is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.checkpoint.examine import Checkpoint, Format, examine
from megatron_ntp.checkpoint.folder import MARKER, Candidate, Folder
from megatron_ntp.errors import CheckpointError

ContentCheck = Callable[[Checkpoint], Sequence[str]]
"""Reads a whole checkpoint's bytes; what is wrong with them."""

_MOST_PROBLEMS = 3


@dataclass(frozen=True)
class Skipped:
    """A newer checkpoint that was not taken, and why. For `is_set_back` see [Set back]."""

    name: str
    why: str
    is_set_back: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Choice:
    """The checkpoint that was taken, if any, and what was passed over on the way to it."""

    folder: Folder
    chosen: Checkpoint | None
    skipped: tuple[Skipped, ...]


def choose(
    folder: Folder,
    step: int | None = None,
    check_content: ContentCheck | None = None,
    look: Callable[[Candidate], Checkpoint] = examine,
) -> Choice:
    """Finds the newest checkpoint that is whole.

    Args:
        folder: where to look.
        step: take this iteration and no other.
        check_content: asked about a checkpoint whose names and sizes are right.
        look: examines a candidate.

    Raises:
        CheckpointError: iteration `step` was asked for and is not whole.
    """
    skipped: list[Skipped] = []
    if folder.tracker.problem:
        skipped.append(Skipped("tracker", folder.tracker.problem))
    named = folder.tracker.name
    if named and step is None and named not in {c.name for c in folder.candidates}:
        skipped.append(Skipped(named, "the tracker names it, but it is not there"))
    for candidate in folder.candidates:
        if step is not None and candidate.iteration != step:
            continue
        checkpoint = look(candidate)
        problems = list(checkpoint.problems)
        if not problems and step is None and _set_back(folder, checkpoint):
            why = f"the tracker was set back to {named} after it was saved"
            skipped.append(Skipped(candidate.name, why, is_set_back=True))
            continue
        if not problems and check_content is not None and checkpoint.format is Format.TORCH_DIST:
            problems = list(check_content(checkpoint))
        if not problems:
            return Choice(folder, checkpoint, tuple(skipped))
        skipped.append(Skipped(candidate.name, told(problems)))
    if step is not None:
        reason = skipped[-1].why if skipped else "it is not there"
        raise CheckpointError(
            f"--ckpt-step {step} cannot be loaded from {folder.path}: {reason}. "
            f"There are: {', '.join(c.name for c in folder.candidates) or 'none'}"
        )
    return Choice(folder, None, tuple(skipped))


def told(problems: Sequence[str]) -> str:
    """Several problems in one line, the first few in full."""
    rest = len(problems) - _MOST_PROBLEMS
    shown = "; ".join(problems[:_MOST_PROBLEMS])
    return f"{shown}; and {rest} more" if rest > 0 else shown


def _set_back(folder: Folder, checkpoint: Checkpoint) -> bool:
    """See [Set back]."""
    named = next((c for c in folder.candidates if c.name == folder.tracker.name), None)
    if named is None or checkpoint.candidate.age_key <= named.age_key:
        return False
    completed_at = _completed_at(checkpoint.path)
    return completed_at is not None and completed_at < folder.tracker.written_at


def _completed_at(path: Path) -> float | None:
    try:
        return (path / MARKER).stat().st_mtime
    except OSError:
        return None
