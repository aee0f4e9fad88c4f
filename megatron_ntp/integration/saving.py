"""What can go wrong with a checkpoint that is being saved, said in time and in one place."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megatron_ntp.atomic import write_atomically
from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.examine import HASHES
from megatron_ntp.checkpoint.folder import MARKER, RELEASE, TRACKER, list_folder, read_tracker
from megatron_ntp.checkpoint.judge import MODEL_ONLY, RESHARDABLE_FLAG
from megatron_ntp.errors import (
    CheckpointError,
    NTPError,
    OtherRankFailedError,
    UnsupportedFlagError,
)
from megatron_ntp.integration.context import NTPContext

_FULL_BELOW_NBYTES = 1 << 16
_WRITE_FAILED = ("No space left on device", "Input/output error", "Disk quota exceeded",
                 "Read-only file system", "PytorchStreamWriter", "Stale file handle")  # fmt: skip
_WRITER_FAILED = "Worker failure: "  # of Megatron, before the words of what failed
_NO_RESULT = "results_queue should not be empty"  # of Megatron, where a writer left no result


def optimizer_cannot_be_resharded(args: argparse.Namespace) -> bool:
    """Whether checkpoints of this run will hold optimizer state that fits one TP degree only."""
    return bool(
        args.use_distributed_optimizer
        and not args.no_save_optim
        and not getattr(args, "dist_ckpt_optim_fully_reshardable", False)
    )


def refuse_lost_state(args: argparse.Namespace, is_reduced: bool) -> None:
    """A reduced job could not even be resumed from such checkpoints.

    Raises:
        UnsupportedFlagError: naming the flag that is missing.
    """
    if is_reduced and args.save and optimizer_cannot_be_resharded(args):
        raise UnsupportedFlagError(
            "--save with --use-distributed-optimizer: the default optimizer format cannot be read "
            f"or written at the degrees of this job; add {RESHARDABLE_FLAG}"
        )


def warnings_of(args: argparse.Namespace) -> list[str]:
    """Why what this run saves would be of no use, or of less, after a GPU is lost."""
    if not args.save:
        return ["nothing is saved (no --save): a failure loses all progress"]
    found = []
    if not args.save_interval:
        found.append(
            "nothing is saved before the end (no --save-interval): a failure loses all progress"
        )
    if optimizer_cannot_be_resharded(args):
        found.append(
            "the optimizer state that is saved cannot be read at another TP degree: after a "
            f"failure only the model could be loaded ({MODEL_ONLY}). Add {RESHARDABLE_FLAG}"
        )
    if args.no_save_optim:
        found.append(
            "no optimizer state is saved (--no-save-optim): after a failure only the model could "
            f"be loaded ({MODEL_ONLY})"
        )
    return found


def print_warnings(ntp: NTPContext, args: argparse.Namespace, when: str) -> None:
    """One line for each, by global rank 0."""
    if ntp.global_rank == 0:
        for warning in warnings_of(args):
            print(f"nonuniform TP WARNING ({when}): {warning}", flush=True)


def prepare(ntp: NTPContext, args: argparse.Namespace, path: Path) -> None:
    """Sets right what Megatron would trip over while it saves. Global rank 0 does it.

    An older checkpoint of the same iteration no longer counts as whole: Megatron overwrites it file
    by file and marks it at the end. Left marked, a mixture of two saves would pass for a whole
    checkpoint if this one is interrupted; left with its hashes (--verify-integrity), a whole one
    would pass for damaged.

    With --save-retain-interval Megatron ends a save by reading the tracker as a number, and dies
    where it is none: one that is torn is written anew first, or removed where it names nothing.
    """
    if ntp.global_rank != 0:
        return
    for name in (MARKER, HASHES):
        (path / name).unlink(missing_ok=True)
    tracker = read_tracker(path.parent)
    is_retaining = getattr(args, "save_retain_interval", None) is not None
    if is_retaining and (tracker.problem or tracker.name == RELEASE):
        _rewrite_tracker(path.parent, ntp)


def _rewrite_tracker(folder: Path, ntp: NTPContext) -> None:
    """Lets it name what was loaded from its folder, as it would if nothing had happened to it."""
    loaded = ntp.load
    if (
        loaded is not None
        and loaded.name is not None
        and not loaded.is_release
        and Path(loaded.folder).resolve() == folder.resolve()
    ):
        write_atomically(folder / TRACKER, str(loaded.iteration))
    else:
        (folder / TRACKER).unlink()


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Around the writing of a checkpoint, on every rank: tells a failing disk or writer as that.

    Raises:
        CheckpointError: the checkpoint could not be written.
        OtherRankFailedError: it could not, and another rank knows why.
    """
    try:
        yield
    except NTPError:
        raise
    except (Exception, CheckpointException) as error:  # torch derives it from BaseException
        folder = path.parent
        why = _why(error, folder)
        if isinstance(error, CheckpointException) and not error.failures and why is None:
            raise OtherRankFailedError(f"{path} could not be saved by another rank") from error
        if why is None:
            raise
        raise CheckpointError(
            f"{path} could not be saved: {why}. It is incomplete and will not be loaded; earlier "
            f"checkpoints were not touched ({_newest(folder)}). Put that right, and "
            "start again with the same flags"
        ) from error


def oldest_unfinished(paths: list[Path]) -> Path:
    """The first of a run's checkpoints, in the order of its saves, that is not whole."""
    unfinished = (path for path in paths if path.is_dir() and not (path / MARKER).is_file())
    return next(unfinished, paths[-1])  # one that is not there any more was whole, and is retired


def _why(error: BaseException, folder: Path) -> str | None:
    """What is wrong with the disk or the writer, if that is what the error is about.

    Ranks whose own writes went well learn only that another's did not, so they look for
    themselves, and come to the same words.
    """
    try:
        free_nbytes = shutil.disk_usage(folder).free
    except OSError as lost:
        return f"{folder} is gone ({lost.strerror})"
    if free_nbytes < _FULL_BELOW_NBYTES:
        return f"no space is left on the disk of {folder}"
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT):
            return os.strerror(cause.errno or 0)
        text = "" if isinstance(cause, CheckpointException) else str(cause)
        if text.startswith(_WRITER_FAILED):
            return text.removeprefix(_WRITER_FAILED).strip()
        if _NO_RESULT in text:
            return "the process that writes it in the background has ended (killed? out of memory?)"
        if any(sign in text for sign in _WRITE_FAILED):
            return text.strip().splitlines()[-1]
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what torch's checkpoint code wrapped in it, and what it was raised from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        cause = waiting.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        if isinstance(cause, CheckpointException):
            waiting += [failure for failure, _ in cause.failures.values()]
        waiting += [e for e in (cause.__cause__, cause.__context__) if e is not None]


def own_error(error: BaseException) -> CheckpointError | None:
    """The error of ours that torch's checkpoint code has wrapped, if there is one."""
    return next((cause for cause in _causes(error) if isinstance(cause, CheckpointError)), None)


def _newest(folder: Path) -> str:
    try:
        chosen = choose(list_folder(folder)).chosen
    except CheckpointError:
        return "which of them are whole cannot be read now"
    return f"the newest whole one is {chosen.name}" if chosen else "there is no whole one yet"
