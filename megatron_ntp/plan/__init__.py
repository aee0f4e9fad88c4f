"""Who owns what in a job of uneven TP degrees: ints in, frozen plans out, no torch.

`partition` cuts families of units, `topology` numbers ranks, `batch` shares out microbatches,
`model` names the sizes, and `plan` puts them into one versioned `Plan` with a digest (`serial` and
`table` are its text forms).
"""

from megatron_ntp.plan.batch import (
    BATCH_POLICIES,
    BatchPolicy,
    BatchShares,
    microbatch_shares,
    plan_batch,
)
from megatron_ntp.plan.model import FAMILIES, ModelDims
from megatron_ntp.plan.partition import (
    Piece,
    Route,
    RowInterval,
    UnitLayout,
    UnitRange,
    balanced_sizes,
    imbalance,
)
from megatron_ntp.plan.plan import (
    PLAN_VERSION,
    Difference,
    Plan,
    build_plan,
    first_difference,
)
from megatron_ntp.plan.topology import (
    FailedSlot,
    RankInfo,
    Topology,
    format_degrees,
    format_failed,
    parse_degrees,
    parse_failed,
)

__all__ = [
    "BATCH_POLICIES",
    "FAMILIES",
    "PLAN_VERSION",
    "BatchPolicy",
    "BatchShares",
    "Difference",
    "FailedSlot",
    "ModelDims",
    "Piece",
    "Plan",
    "RankInfo",
    "Route",
    "RowInterval",
    "Topology",
    "UnitLayout",
    "UnitRange",
    "balanced_sizes",
    "build_plan",
    "first_difference",
    "format_degrees",
    "format_failed",
    "imbalance",
    "microbatch_shares",
    "parse_degrees",
    "parse_failed",
    "plan_batch",
]
