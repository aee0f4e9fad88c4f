"""What a person sees when a rank cannot start: one message, without a traceback.

The errors reported here say all there is to say: rule, values, ranks and cure. Most of them come
from flags and plans that all ranks share, so all ranks hit them, and one rank speaks for the job.
Every rank still ends with a failure. Other errors keep their traceback, except that of a rank which
waited for one that has ended so: it says whom to look at.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

from megatron_ntp.errors import CheckpointError, OtherRankFailedError, PlanError, StartError

STATUS = 2

# A launcher kills the job when the first rank ends: leave the rank that speaks time to do so.
_SILENT_WAIT_S = 0.5
# One that failed may yet have to look what is left of a checkpoint folder before it speaks.
_SPEAKER_WAIT_S = 60.0
_LOST_PEER_WAIT_S = 1.0

# How gloo and NCCL tell that the process at the other end has gone.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


def report(error: BaseException) -> bool:
    """Prints a start-up error, from one rank of those that have the same one.

    Returns:
        whether it is such an error, or comes of one; for any other nothing is printed.
    """
    if isinstance(error, PlanError | StartError | CheckpointError):
        _tell(error)
        return True
    return _follows_another(error)


def _tell(error: Exception) -> None:
    from megatron_ntp.comm.report import claim

    text = f"megatron-ntp: error: {error}"
    rank = os.environ.get("RANK")
    if claim(text):
        sys.stdout.flush()
        suffix = f"\n  (reported by rank {rank}; the job stops)" if rank else ""
        print(text + suffix, file=sys.stderr, flush=True)
    else:
        time.sleep(_SILENT_WAIT_S)


def _follows_another(error: BaseException) -> bool:
    """Whether this rank only learnt that another has failed, which tells what it is about."""
    from megatron_ntp.comm.report import speaker

    if isinstance(error, OtherRankFailedError):
        told_by = speaker(_SPEAKER_WAIT_S)
    elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_GONE):
        told_by = speaker(_LOST_PEER_WAIT_S)
        if told_by is None:
            return False
    else:
        return False
    why = f": {error}" if told_by is None else f", since rank {told_by} has"
    rank = os.environ.get("RANK")
    sys.stderr.write(f"megatron-ntp: rank {rank} stops{why}\n")  # in one piece, beside other ranks
    sys.stderr.flush()
    return True


def install_excepthook() -> None:
    """Makes uncaught start-up errors of this process end in `report`.

    For a script that plain Python started, in a patched checkout; `megatron-ntp run` catches them.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if not report(error):
            before(kind, error, traceback)

    sys.excepthook = hook
