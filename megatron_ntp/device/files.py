"""Files that must be whole, and must be ours: atomic replacement, no links followed.

A `Folder` is opened once, checked, and then used through its descriptor, so that nobody can swap it
for another between the check and the use. A private folder belongs to the user who runs us, and
nobody else can write in it: what is read back from it was written by us.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from pathlib import Path
from types import TracebackType

from megatron_ntp.device.errors import DeviceError, Fault

MAX_FILE_BYTES = 1 << 20


def _refuse(what: str) -> DeviceError:
    return DeviceError(Fault.REFUSED, what)


class Folder:
    """An open folder. Names are plain file names in it. It closes when nobody uses it any more."""

    def __init__(self, path: Path, private: bool, create: bool = True) -> None:
        self.path, self.private = path, private
        try:
            if create:
                path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
            self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _refuse(
                f"folder {path} cannot be made or opened without following links: {error}"
            ) from error
        self._close = weakref.finalize(self, os.close, self.fd)
        if private:
            self._check_private()

    def _check_private(self) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            self.close()
            raise _refuse(
                f"folder {self.path} belongs to uid {found.st_uid} with mode "
                f"{stat.filemode(found.st_mode)}; it must belong to uid {os.geteuid()} and be "
                "writable by nobody else"
            )

    def close(self) -> None:
        self._close()  # once: a second call does nothing

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def names(self) -> list[str]:
        return sorted(os.listdir(self.fd))

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a regular file with one name; anything else there is refused."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _refuse(f"{self.path / name} cannot be opened: {error}") from error
        found = os.fstat(fd)
        ours = not self.private or found.st_uid == os.geteuid()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or not ours:
            os.close(fd)
            raise _refuse(
                f"{self.path / name} is not a plain file of ours ({stat.filemode(found.st_mode)}, "
                f"uid {found.st_uid}, {found.st_nlink} names)"
            )
        return fd

    def read(self, name: str) -> str | None:
        """The text of a file; None where there is none."""
        try:
            fd = self.open_file(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES)

    def write(self, name: str, text: str) -> None:
        """Replaces a file by a whole new one: after a crash the old or the new one is there."""
        scratch = f".{name}.{os.getpid()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch, dir_fd=self.fd)
            fd = self.open_file(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.rename(scratch, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            os.fsync(self.fd)
        except OSError as error:
            what = f"{self.path / name} cannot be written: {error}"
            raise DeviceError(Fault.FAILED, what) from error

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file that needs no protection from other users."""
    with Folder(path.resolve().parent, private=False) as folder:
        folder.write(path.name, text)


def read_regular(path: Path) -> str | None:
    """The text of such a file; None where there is none."""
    try:
        with Folder(path.resolve().parent, private=False, create=False) as folder:
            return folder.read(path.name)
    except DeviceError:
        if not path.parent.exists():
            return None
        raise
