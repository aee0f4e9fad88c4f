"""The process groups that Megatron keeps as module globals, and what each is in a nonuniform job.

Data without Megatron, so that the doctor can hold a checkout's source against it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

CORE_WORLD = "core-world"

# parallel_state global -> (kind of group, "group" or "ranks"). None: stays unset, as in a Megatron
# run without that feature.
GLOBALS: dict[str, tuple[str, str] | None] = {
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


def unknown_groups(names: Iterable[str]) -> list[str]:
    """Globals of `megatron.core.parallel_state` that hold groups and are not in the table."""
    return [
        name
        for name in names
        if name.startswith("_") and "_GROUP" in name and name.isupper() and name not in GLOBALS
    ]


def global_names(source: str) -> list[str]:
    """What the text of a module assigns at its top level."""
    found = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found += [target.id for target in targets if isinstance(target, ast.Name)]
    return found
