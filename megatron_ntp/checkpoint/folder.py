"""What lies in a `--load` folder: checkpoints by iteration, and the tracker file that names one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
MARKER = "metadata.json"
"""The file of a checkpoint that is written last."""
RELEASE = "release"

_ITERATION = re.compile(r"iter_(\d{7,})")
_MOST_OF_TRACKER = 64


@dataclass(frozen=True)
class Candidate:
    """A folder that may hold a checkpoint. `iteration` is None for `release`."""

    path: Path
    iteration: int | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def age_key(self) -> int:
        """Sorts candidates by age: a release comes before everything that was trained from it."""
        return -1 if self.iteration is None else self.iteration


@dataclass(frozen=True)
class Tracker:
    """The tracker file. Megatron writes it last, once a checkpoint is whole.

    Attributes:
        name: folder that it names; None if there is no tracker, or none that says anything.
        problem: why it says nothing, empty if there is none or it is good.
        written_at: when it was written, in seconds since the epoch.
    """

    name: str | None
    problem: str = ""
    written_at: float = 0.0


@dataclass(frozen=True)
class Folder:
    """A `--load` folder, as it was when it was listed.

    Attributes:
        candidates: newest first.
        was_saved_to: whether a save into it was ever completed. Megatron then leaves a tracker, and
            should that be lost, a marker in the checkpoint.
    """

    path: Path
    exists: bool
    tracker: Tracker
    candidates: tuple[Candidate, ...]
    was_saved_to: bool = False


def list_folder(path: Path) -> Folder:
    """Lists a folder of checkpoints; one that does not exist is empty.

    Raises:
        CheckpointError: it is no folder, is a checkpoint itself, or cannot be read.
    """
    try:
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except FileNotFoundError:
        return Folder(path, False, Tracker(None), ())
    except NotADirectoryError:
        raise CheckpointError(
            f"{path} is a file; give the folder that holds {TRACKER} and iter_... folders"
        ) from None
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    names = {entry.name for entry in entries}
    if names & {".metadata", "metadata.json"} and TRACKER not in names:
        raise CheckpointError(
            f"{path} is one checkpoint, not a folder of checkpoints; give {path.parent}, and "
            f"--ckpt-step if it is not the newest there"
        )
    found = [_candidate(Path(entry.path)) for entry in entries if _is_folder(entry)]
    candidates = sorted(filter(None, found), key=lambda c: c.age_key, reverse=True)
    tracker = read_tracker(path)
    was_saved_to = (
        tracker.name is not None
        or bool(tracker.problem)
        or any((candidate.path / MARKER).exists() for candidate in candidates)
    )
    return Folder(path, True, tracker, tuple(candidates), was_saved_to)


def unreadable(path: Path, error: OSError) -> str:
    """What to say about a path that the system would not read."""
    return (
        f"{path} cannot be read: {error.strerror or error} (errno {error.errno}). Look at the "
        "disk and its mount on this node, and at the permissions"
    )


def read_tracker(folder: Path) -> Tracker:
    """The tracker of a folder. One that is torn or cannot be read is a problem, not an error."""
    path = folder / TRACKER
    try:
        with open(path, "rb") as stream:
            text = stream.read(_MOST_OF_TRACKER).decode("ascii", "replace").strip()
        written_at = path.stat().st_mtime
    except FileNotFoundError:
        return Tracker(None)
    except OSError as error:
        return Tracker(None, f"{TRACKER} cannot be read: {error.strerror or error}")
    if text == RELEASE:
        return Tracker(RELEASE, written_at=written_at)
    if text.isdecimal():
        return Tracker(f"iter_{int(text):07d}", written_at=written_at)
    said = f"says {text!r}" if text else "is empty"
    return Tracker(None, f"{TRACKER} {said}, not an iteration", written_at)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _candidate(path: Path) -> Candidate | None:
    if path.name == RELEASE:
        return Candidate(path, None)
    match = _ITERATION.fullmatch(path.name)
    return Candidate(path, int(match[1])) if match else None
