"""One voice for many ranks: who of those that hit the same error says so."""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta

import torch.distributed as dist

_CONNECT_TIMEOUT_S = 2.0


def claim(text: str) -> bool:
    """Whether this rank is the one to print `text`: the first of the job that asks.

    Asks the store that torchrun keeps, which outlives every rank. Without one (ranks started by
    hand, or the store gone) everyone is told to speak: a message too many is better than none.
    """
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not rank or not world_size:
        return True
    key = "ntp/report/" + hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        store, _, _ = next(dist.rendezvous("env://", int(rank), int(world_size), timeout=timeout))
        return store.add(key, 1) == 1
    except (RuntimeError, ValueError):
        return True
