"""The output folder: which files in it are the rehearsal's, and that two do not share them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.rehearsal.job import RehearsalError

_MARKER = ".made-by-megatron-ntp-rehearse"


@dataclass(frozen=True)
class Outputs:
    """Where everything goes. Only these paths are ever written or removed."""

    root: Path

    @property
    def picture(self) -> Path:
        return self.root / "rehearsal.png"

    @property
    def results(self) -> Path:
        return self.root / "rehearsal.json"

    @property
    def work(self) -> Path:
        """Logs, checkpoints, losses, statistics and the plan."""
        return self.root / "rehearsal"


@contextmanager
def claimed(root: Path) -> Iterator[Outputs]:
    """The outputs, emptied of what an earlier rehearsal left, for this process alone.

    Raises:
        RehearsalError: another rehearsal runs there, or the folder is not one of ours.
    """
    outputs = Outputs(root.resolve())
    marker = outputs.work / _MARKER
    try:
        if outputs.work.exists() and not marker.exists() and any(outputs.work.iterdir()):
            raise RehearsalError(
                f"{outputs.work} is not empty and was not made by a rehearsal. Move it away, or "
                "choose another folder with --output"
            )
        outputs.work.mkdir(parents=True, exist_ok=True)
        lock = marker.open("a")
    except OSError as error:
        raise RehearsalError(f"cannot write to {outputs.work}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RehearsalError(
                f"another rehearsal is running in {outputs.root}. Wait for it, or choose another "
                "folder with --output"
            ) from error
        for path in outputs.work.iterdir():
            if path != marker:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        outputs.picture.unlink(missing_ok=True)
        outputs.results.unlink(missing_ok=True)
        yield outputs
