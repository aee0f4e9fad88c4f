"""Megatron's process groups for a job whose replicas have different TP degrees.

Replaces `megatron.core.parallel_state.initialize_model_parallel`. The groups of one replica (TP,
PP, model parallel, embeddings) have the replica's own size. Whatever runs across replicas (DP,
optimizer statistics) holds core ranks only; an extra rank is alone in its group of those kinds and
answers questions about its DP rank through Megatron's override variables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ntp.comm.groups import Membership, create_groups
from megatron_ntp.errors import PlanTopologyError, StartError
from megatron_ntp.integration import context
from megatron_ntp.integration.group_table import CORE_WORLD, GLOBALS, unknown_groups
from megatron_ntp.integration.meeting import meet
from megatron_ntp.integration.refusals import refuse_settings
from megatron_ntp.plan.topology import Topology

RESHARD = "reshard"
CORE_REPLICA = "core-replica"


def group_kinds(topology: Topology, gloo: bool) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Every kind of group of a job without pipeline and context parallelism, as global ranks."""
    alone = tuple((info.global_rank,) for info in topology.ranks)
    extras_alone = tuple((rank,) for rank in topology.extra_ranks)
    core_replicas = tuple(
        tuple(rank for rank in ranks if topology.rank(rank).is_core) for ranks in topology.tp_groups
    )
    dp = topology.core_dp_groups + extras_alone
    kinds = {
        "alone": alone,
        "tp": topology.tp_groups,
        "mp": topology.model_parallel_groups,
        "pp": topology.pp_groups,
        RESHARD: topology.tp_groups,
        CORE_REPLICA: core_replicas + extras_alone,
        CORE_WORLD: (topology.core_ranks, *extras_alone),
        "world": (tuple(range(topology.world_size)),),
        "dp": dp,
    }
    if gloo:
        kinds["dp-gloo"] = dp
    return kinds


def initialize_model_parallel(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Stands in for `parallel_state.initialize_model_parallel` (same arguments)."""
    ntp = context.current()
    if ntp is None:
        original(*args, **kwargs)
        return
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    refuse_settings("initialize_model_parallel", given)
    nominal_tp = given.get("tensor_model_parallel_size", 1)
    if nominal_tp != ntp.topology.nominal_tp:
        raise PlanTopologyError(
            f"initialize_model_parallel was given a TP size of {nominal_tp}, but the plan is for a "
            f"healthy degree of {ntp.topology.nominal_tp}. Keep the healthy degree there; the plan "
            "lowers it per replica"
        )
    if ntp.must_check_in:
        meet(dist.distributed_c10d._get_default_store(), ntp)
        ntp.must_check_in = False
    _check_known_globals()
    gloo = bool(given.get("create_gloo_process_groups", True))
    minutes = given.get("distributed_timeout_minutes", 30)
    groups = create_groups(
        group_kinds(ntp.topology, gloo), timedelta(minutes=minutes), frozenset({"dp-gloo"})
    )
    ntp.groups = groups
    set_globals(groups, ntp.rank.dp_rank, ntp.topology.num_replicas, ntp.is_extra)
    if ntp.boost is not None:
        ntp.boost.connect(timedelta(minutes=minutes))


def set_globals(
    groups: dict[str, Membership], dp_rank: int, num_replicas: int, is_extra: bool
) -> None:
    """Writes the groups into Megatron's module globals of the installed version."""
    for name, source in GLOBALS.items():
        if source is None or not hasattr(parallel_state, name):
            continue
        kind, part = source
        if kind not in groups:
            continue
        membership = groups[kind]
        value = membership.group if part == "group" else list(membership.global_ranks)
        setattr(parallel_state, name, value)
    if is_extra:
        # Its DP groups hold itself alone, yet samples and losses are counted per replica.
        parallel_state._MPU_DATA_PARALLEL_RANK = dp_rank
        parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = num_replicas
    parallel_state._global_process_group_list = [None] + _unique(
        [membership.group for membership in groups.values()]
    )
    parallel_state._set_global_memory_buffer()


def destroy_model_parallel(original: Callable[[], None]) -> None:
    """Also resets the override variables, which Megatron's own function leaves set."""
    original()
    parallel_state._MPU_DATA_PARALLEL_RANK = None
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = None


def _check_known_globals() -> None:
    unknown = unknown_groups(vars(parallel_state))
    if unknown:
        raise StartError(
            f"this Megatron has process groups that megatron-ntp does not know: "
            f"{', '.join(unknown)}. Use a tested version; docs/maintainers.md tells how a new one "
            "is supported (the groups go into integration/group_table.py)"
        )


def _unique(items: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())
