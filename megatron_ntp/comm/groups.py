"""Process groups of unequal replicas, and the check-in before the first collective.

Every rank creates every group, in one order (torch.distributed.new_group is collective over the
job), and then keeps those it is a member of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_ntp.errors import StartError

_POLL_S = 0.05


@dataclass(frozen=True)
class Membership:
    """The group of one kind that this rank belongs to, and its members as global ranks."""

    group: dist.ProcessGroup
    global_ranks: tuple[int, ...]


def create_groups(
    kinds: Mapping[str, Sequence[Sequence[int]]],
    timeout: timedelta,
    gloo_kinds: frozenset[str] = frozenset(),
) -> dict[str, Membership]:
    """Creates every group of every kind and returns this rank's membership per kind.

    Called by all ranks of the job, with the same arguments. The groups of a kind are disjoint and
    together hold every rank.

    Args:
        kinds: per kind, its groups as global ranks.
        timeout: how long a collective of these groups may take.
        gloo_kinds: kinds whose groups use gloo whatever the default backend is.
    """
    rank = dist.get_rank()
    mine: dict[str, Membership] = {}
    for kind, groups in kinds.items():
        members = sorted(member for ranks in groups for member in ranks)
        assert members == list(range(dist.get_world_size())), (
            f"groups of kind '{kind}' must hold each rank of the job once: {groups}"
        )
        for ranks in groups:
            group = dist.new_group(
                list(ranks), timeout=timeout, backend="gloo" if kind in gloo_kinds else None
            )
            if rank in ranks:
                mine[kind] = Membership(group, tuple(ranks))
    return mine


def check_in(
    store: dist.Store,
    rank: int,
    world_size: int,
    entries: Sequence[tuple[str, str]],
    timeout_s: float,
    note: str = "",
) -> list[str]:
    """Waits until every rank came and holds the same plan; uses the store only, no collective.

    Every rank comes to the same verdict in the same words, so that one of them need be shown.

    Args:
        store: the job's rendezvous store.
        rank: this rank's global rank.
        world_size: number of ranks that must come.
        entries: what the plan consists of, as (name, value), in one order.
        timeout_s: how long to wait for them.
        note: what this rank has to say beside its plan.

    Returns:
        the notes of all ranks, in rank order.

    Raises:
        StartError: ranks missing after `timeout_s` (named), or with another plan than most (ranks
            and the first entry that differs named).
    """
    keys = [f"ntp/check-in/{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], json.dumps([note, [list(entry) for entry in entries]]))
        missing = _wait_for_keys(store, keys, timeout_s)
        said = [] if missing else [json.loads(store.get(key)) for key in keys]
    except RuntimeError as error:  # torch's store errors derive from it
        raise StartError(
            f"rank {rank} lost the rendezvous store while it waited for the others ({error}). The "
            "process that holds it, torchrun or rank 0, ended: look for the first error in its log"
        ) from error
    if missing:
        raise StartError(
            f"{_ranks(missing)} of {world_size} did not start within {timeout_s:g} s. Look at "
            "their logs and nodes; if they are only slow to start, raise --ntp-start-timeout"
        )
    _compare([plan for _, plan in said])
    return [each for each, _ in said]


def _compare(plans: Sequence[list[list[str]]]) -> None:
    """Raises unless all ranks checked in with the same plan. What most ranks hold is the norm."""
    norm = max(plans, key=plans.count)
    usual = [rank for rank, plan in enumerate(plans) if plan == norm]
    others = [rank for rank, plan in enumerate(plans) if plan != norm]
    if not others:
        return
    first = _first_difference(norm, usual[0], plans[others[0]], others[0])
    raise StartError(
        f"the plan of {_ranks(others)} is not that of {_ranks(usual)}; first difference: {first}. "
        "Start every rank with the same flags and plan file"
    )


def _wait_for_keys(store: dist.Store, keys: Sequence[str], timeout_s: float) -> list[int]:
    """Indices of the keys that are not in the store when time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        # One request for all of them in the usual case; keys are named only when time is up.
        if store.check(list(keys)):
            return []
        if time.monotonic() > deadline:
            return [index for index, key in enumerate(keys) if not store.check([key])]
        time.sleep(_POLL_S)


def _first_difference(
    plan: Sequence[Sequence[str]], rank: int, other: Sequence[Sequence[str]], other_rank: int
) -> str:
    for (name, value), (other_name, other_value) in zip(plan, other, strict=False):
        if name != other_name:
            return f"entry '{name}' on rank {rank}, '{other_name}' on rank {other_rank}"
        if value != other_value:
            return f"{name} is {value} on rank {rank}, {other_value} on rank {other_rank}"
    return f"{len(plan)} entries on rank {rank}, {len(other)} on rank {other_rank}"


def _ranks(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    rest = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{rest}"
