"""Files that are never half written."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file next to `path` and renames it onto `path`.

    Raises:
        OSError: it cannot be written. What was at `path` is unchanged.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
