"""One voice for many ranks: who of those that hit the same error says so, and who only follows.

Asks the store that torchrun keeps, which outlives every rank. Without one (ranks started by hand,
or the store gone) everyone is told to speak: a message too many is better than none.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch.distributed as dist

_CONNECT_TIMEOUT_S = 2.0
_SPEAKER = "ntp/report/speaker"


def claim(text: str) -> bool:
    """Whether this rank is the one to print `text`: the first of the job that asks."""
    store = _agent_store()
    if store is None:
        return True
    try:
        key = "ntp/report/" + hashlib.sha256(text.encode()).hexdigest()[:16]
        is_first = store.add(key, 1) == 1
        if is_first:
            store.set(_SPEAKER, os.environ["RANK"])
        return is_first
    except RuntimeError:
        return True


def speaker(wait_s: float) -> int | None:
    """The global rank that tells this job's error; None where none does, or nobody knows."""
    store = _agent_store()
    if store is None:
        return None
    try:
        store.wait([_SPEAKER], timedelta(seconds=wait_s))
        return int(store.get(_SPEAKER))
    except RuntimeError:
        return None


def _agent_store() -> dist.Store | None:
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not rank or not world_size:
        return None
    try:
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        store, _, _ = next(dist.rendezvous("env://", int(rank), int(world_size), timeout=timeout))
        return store
    except (RuntimeError, ValueError):
        return None
