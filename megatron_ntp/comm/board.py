"""Notes that ranks leave for each other in the rendezvous store, before there is a process group.

For decisions that one rank takes for all, and work that all share: no collective, no device.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_ntp.errors import StartError

_POLL_S = 0.05
_MOST_QUESTIONS_PER_S = 5000  # of all ranks together: one process answers them all
_MOST_NAMED = 8


class Board:
    """One topic in the store of a job.

    Args:
        store: the job's rendezvous store.
        topic: prefix of the keys.
        rank: this rank's global rank.
        world_size: number of ranks.
        timeout_s: how long to wait for a note.
    """

    def __init__(
        self, store: dist.Store, topic: str, rank: int, world_size: int, timeout_s: float
    ) -> None:
        self._store = dist.PrefixStore(f"ntp/{topic}", store)
        self.rank, self.world_size = rank, world_size
        self._timeout_s = timeout_s
        self._poll_s = max(_POLL_S, world_size / _MOST_QUESTIONS_PER_S)

    def tell_all(self, subject: str, value: Any) -> None:
        """Rank 0 says something that every rank reads with `hear`."""
        assert self.rank == 0
        with self._reachable():
            self._store.set(subject, json.dumps(value))

    def hear(self, *subjects: str, what: str, extra_s: float = 0.0) -> tuple[str, Any]:
        """The first of several subjects that rank 0 speaks about, and what it says.

        Args:
            subjects: in the order in which they count where it has spoken about several.
            what: names them in the error if nothing comes.
            extra_s: how much longer to wait than usual.
        """
        deadline = time.monotonic() + self._timeout_s + extra_s
        while True:
            with self._reachable():
                for subject in subjects:
                    if self._store.check([subject]):
                        return subject, json.loads(self._store.get(subject))
            if time.monotonic() > deadline:
                raise StartError(
                    f"rank 0 did not say {what} within {self._timeout_s + extra_s:g} s; look at "
                    "its log. If it is only slow, raise --ntp-start-timeout"
                )
            time.sleep(self._poll_s)

    def hand_in(self, subject: str, value: Any) -> None:
        """Every rank hands in its own note; rank 0 may `collect` them."""
        with self._reachable():
            self._store.set(f"{subject}/{self.rank}", json.dumps(value))

    def collect(self, subject: str, what: str, extra_s: float = 0.0) -> list[Any]:
        """Rank 0 waits for the notes of all ranks, and returns them in rank order."""
        assert self.rank == 0
        keys = [f"{subject}/{rank}" for rank in range(self.world_size)]
        missing = self._wait(keys, self._timeout_s + extra_s)
        if missing:
            named = ", ".join(map(str, missing[:_MOST_NAMED]))
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            raise StartError(
                f"no {what} from rank {named}{more} within {self._timeout_s + extra_s:g} s; look "
                "at their logs and nodes. If they are only slow, raise --ntp-start-timeout"
            )
        with self._reachable():
            return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str], timeout_s: float) -> list[int]:
        """Indices of the keys that are not there when time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._reachable():
                if self._store.check(list(keys)):
                    return []
                if time.monotonic() > deadline:
                    return [index for index, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(self._poll_s)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's store errors derive from it
            raise StartError(
                f"rank {self.rank} lost the rendezvous store ({error}). The process that holds it, "
                "torchrun or rank 0, ended: look for the first error in its log"
            ) from error
