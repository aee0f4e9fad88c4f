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
from megatron_ntp.errors import NTPError, PlanTopologyError
from megatron_ntp.integration import context
from megatron_ntp.integration.meeting import meet
from megatron_ntp.plan.topology import Topology

RESHARD = "reshard"
CORE_REPLICA = "core-replica"
CORE_WORLD = "core-world"

# parallel_state global -> (kind of group, "group" or "ranks"). None: stays unset, as in a Megatron
# run without that feature.
_GLOBALS: dict[str, tuple[str, str] | None] = {
    "_TENSOR_MODEL_PARALLEL_GROUP": ("tp", "group"),
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": ("tp", "ranks"),
    "_PIPELINE_MODEL_PARALLEL_GROUP": ("pp", "group"),
    "_PIPELINE_GLOBAL_RANKS": ("pp", "ranks"),
    "_MODEL_PARALLEL_GROUP": ("mp", "group"),
    "_MODEL_PARALLEL_GLOBAL_RANKS": ("mp", "ranks"),
    "_EMBEDDING_GROUP": ("alone", "group"),
    "_EMBEDDING_GLOBAL_RANKS": ("alone", "ranks"),
    "_POSITION_EMBEDDING_GROUP": ("alone", "group"),
    "_POSITION_EMBEDDING_GLOBAL_RANKS": ("alone", "ranks"),
    "_DATA_PARALLEL_GROUP": ("dp", "group"),
    "_DATA_PARALLEL_GROUP_GLOO": ("dp-gloo", "group"),
    "_DATA_PARALLEL_GLOBAL_RANKS": ("dp", "ranks"),
    "_DATA_PARALLEL_GROUP_WITH_CP": ("dp", "group"),
    "_DATA_PARALLEL_GROUP_WITH_CP_GLOO": ("dp-gloo", "group"),
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": ("dp", "ranks"),
    "_DATA_PARALLEL_GROUP_WITH_CP_AG": None,
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": ("dp", "group"),
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": ("dp", "group"),
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": ("dp", "group"),
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": ("dp-gloo", "group"),
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": ("dp", "group"),
    "_INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": None,
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": (CORE_WORLD, "group"),
    "_INTER_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": None,
    "_GTP_WEIGHT_REMAT_GROUP": ("alone", "group"),
    "_GTP_WEIGHT_REMAT_GLOBAL_RANKS": ("alone", "ranks"),
    "_CONTEXT_PARALLEL_GROUP": ("alone", "group"),
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": ("alone", "ranks"),
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS": None,
    "_HYBRID_DP_CP_GROUPS": None,
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": ("tp", "group"),
    "_TENSOR_AND_DATA_PARALLEL_GROUP": ("world", "group"),
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": ("world", "group"),
    "_EXPERT_MODEL_PARALLEL_GROUP": ("alone", "group"),
    "_EXPERT_MODEL_PARALLEL_RANKS": ("alone", "ranks"),
    "_EXPERT_TENSOR_PARALLEL_GROUP": ("tp", "group"),
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": ("tp", "group"),
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": ("mp", "group"),
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": ("mp", "group"),
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": ("alone", "group"),
    "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS": ("alone", "ranks"),
    "_EXPERT_DATA_PARALLEL_GROUP": ("dp", "group"),
    "_EXPERT_DATA_PARALLEL_GROUP_GLOO": ("dp-gloo", "group"),
    "_EXPERT_DATA_PARALLEL_GROUP_AG": None,
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": ("dp", "group"),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": ("dp", "group"),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO": ("dp-gloo", "group"),
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": ("dp", "group"),
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": None,
}


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
    for name, source in _GLOBALS.items():
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
    unknown = [
        name
        for name in vars(parallel_state)
        if name.startswith("_") and "_GROUP" in name and name.isupper() and name not in _GLOBALS
    ]
    if unknown:
        raise NTPError(
            f"this Megatron has process groups that megatron-ntp does not know: {unknown}. Use a "
            "tested version (see `megatron-ntp patches`), or add them to parallel_state._GLOBALS"
        )


def _unique(items: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())
