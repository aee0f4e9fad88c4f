"""Change several files all together or not at all, with no reader ever seeing half of one.

Every new content is first written to a temporary file beside its target, with the target's mode,
owner and extended attributes, and flushed to disk. Then the targets are replaced by renames. If a
rename fails, those done before are taken back.
"""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ntp.patching.rows import PatchError

LOCK_NAME = ".megatron-ntp.lock"
_TEMPORARY = ".megatron-ntp-"

# File systems without locks answer with one of these. The renames stay atomic without a lock.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Change:
    """New content for one file, and the content it was made from."""

    path: Path
    before: bytes
    after: bytes


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of a checkout; a second run at the same time is refused at once.

    The kernel drops the lock if the process is killed; a left-over lock file means nothing.
    """
    path = root / LOCK_NAME
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise PatchError(
            f"cannot write in {root}: {error.strerror}. Nothing was changed. Make the checkout "
            f"writable for this user, or copy it to a place that is."
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PatchError(
                f"another `megatron-ntp patch` is working on {root}. Nothing was changed. "
                f"Wait for it to end, then run this again."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        held = path.exists() and os.path.samestat(os.fstat(handle), path.stat())
        if not held:
            raise PatchError(
                f"another `megatron-ntp patch` has just worked on {root}. Nothing was changed. "
                f"Run this again."
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def fault_of(path: Path) -> str:
    """Why a file cannot be replaced, or an empty string."""
    try:
        info, folder = path.stat(), path.parent.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISREG(info.st_mode):
        return f"{path} is not a regular file"
    writable = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    # The bits are looked at as well, since root may write to what is marked read-only.
    if not info.st_mode & writable or not os.access(path, os.W_OK):
        return f"{path} is read-only (mode {stat.S_IMODE(info.st_mode):04o})"
    if not folder.st_mode & writable or not os.access(path.parent, os.W_OK):
        return f"the folder {path.parent} is read-only (mode {stat.S_IMODE(folder.st_mode):04o})"
    return ""


def _stage(change: Change) -> Path:
    """Write the new content beside its target, as a file that can take the target's place."""
    info = change.path.stat()
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=change.path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(change.after)
            out.flush()
            with contextlib.suppress(OSError):  # only root can give files away
                os.fchown(out.fileno(), info.st_uid, info.st_gid)
            os.fchmod(out.fileno(), stat.S_IMODE(info.st_mode))
            with contextlib.suppress(OSError):  # not every file system has them
                for attribute in os.listxattr(change.path):
                    os.setxattr(out.fileno(), attribute, os.getxattr(change.path, attribute))
            os.fsync(out.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _take_back(done: Sequence[Change], cause: BaseException) -> None:
    for change in reversed(done):
        try:
            os.replace(_stage(Change(change.path, change.after, change.before)), change.path)
        except OSError as error:
            raise PatchError(
                f"{change.path} was changed and could not be restored ({error}) after: {cause}. "
                f"The file itself is whole. Run `megatron-ntp patch revert` on this checkout."
            ) from cause


def replace_all(changes: Sequence[Change]) -> None:
    """Replace the content of all files, or of none. Call it with the checkout's lock held.

    Raises:
        PatchError: a file is read-only, or is not what it was when the change was planned.
        OSError: the disk refused; nothing was changed.
    """
    faults = [fault for change in changes if (fault := fault_of(change.path))]
    if faults:
        raise PatchError(
            f"{'; '.join(faults)}. Nothing was changed. Make it writable (chmod u+w), then run "
            f"this again."
        )
    for folder in {change.path.parent for change in changes}:
        for left in folder.glob(f"{_TEMPORARY}*"):  # of a run that was killed
            left.unlink(missing_ok=True)
    staged: list[Path] = []
    done: list[Change] = []
    try:
        for change in changes:
            staged.append(_stage(change))
        for change in changes:
            if change.path.read_bytes() != change.before:
                raise PatchError(
                    f"{change.path} was changed by somebody else while this ran. Nothing was "
                    f"changed. Run this again."
                )
        for change, temporary in zip(changes, staged, strict=True):
            os.replace(temporary, change.path)
            done.append(change)
    except BaseException as error:
        _take_back(done, error)
        raise
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)
    for folder in {change.path.parent for change in changes}:
        _sync_folder(folder)
