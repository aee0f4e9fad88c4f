"""What a checkpoint says about the job that saved it, and the format of its optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_ntp.checkpoint.modes import LoadMode
from megatron_ntp.checkpoint.stored import Stored

MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_query_groups",
    "group_query_attention",
    "swiglu",
    "normalization",
    "position_embedding_type",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
)
"""Megatron's arguments that say which model it is."""


class OptimizerFormat(Enum):
    """How optimizer state is cut. Values are Megatron's names, where it has one."""

    NONE = "none"
    MODEL_SPACE = "model_space"
    FULLY_RESHARDABLE = "fully_reshardable"
    FULLY_SHARDED_MODEL_SPACE = "fully_sharded_model_space"
    DP_RESHARDABLE = "dp_reshardable"
    DP_ZERO_GATHER_SCATTER = "dp_zero_gather_scatter"
    FSDP_DTENSOR = "fsdp_dtensor"
    UNKNOWN = "unknown"

    @property
    def is_reshardable(self) -> bool:
        """Whether a job of another TP degree can read it."""
        return self in (
            OptimizerFormat.NONE,
            OptimizerFormat.MODEL_SPACE,
            OptimizerFormat.FULLY_RESHARDABLE,
        )


@dataclass(frozen=True)
class SavedJob:
    """Facts of the job that saved a checkpoint. None: the checkpoint does not say.

    `tp`, `dp` are nominal: a job of degrees 4, 3 says TP 4, DP 2 and 7 processes.
    `gave_up_moments`: it began without the optimizer's moments, so what it saved has new ones.
    """

    optimizer_format: OptimizerFormat
    iteration: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    world_size: int | None = None
    degrees: str | None = None
    gave_up_moments: bool = False
    consumed_samples: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


def describe(common: Mapping[str, Any], stored: Stored) -> SavedJob:
    """Reads the facts from the state that all ranks share, and from the keys that are stored."""
    args = common.get("args")
    values = getattr(args, "fields", {})

    def number(name: str) -> int | None:
        value = values.get(name)
        return value if isinstance(value, int) else None

    degrees = values.get("ntp_degrees")
    iteration = common.get("iteration")
    return SavedJob(
        optimizer_format=_optimizer_format(common, values, stored),
        iteration=iteration if isinstance(iteration, int) else None,
        tp=number("tensor_model_parallel_size"),
        pp=number("pipeline_model_parallel_size"),
        cp=number("context_parallel_size"),
        dp=number("data_parallel_size"),
        world_size=number("world_size"),
        degrees=degrees if isinstance(degrees, str) else None,
        gave_up_moments=values.get("ntp_load") == LoadMode.MODEL_ONLY.value,
        consumed_samples=number("consumed_train_samples"),
        model={name: values[name] for name in MODEL_ARGUMENTS if _is_plain(values, name)},
    )


def _is_plain(values: Mapping[str, Any], name: str) -> bool:
    return name in values and isinstance(values[name], bool | int | str | None)


def _optimizer_format(
    common: Mapping[str, Any], args: Mapping[str, Any], stored: Stored
) -> OptimizerFormat:
    """Most reliable first: what is stored, what the save noted, what the flags imply."""
    if not any(key.startswith(("optimizer.", "chained_")) for key in stored.all_keys()):
        return OptimizerFormat.NONE
    content = common.get("content_metadata")
    optimizer = common.get("optimizer")
    for source, key in (
        (content, "distrib_optim_sharding_type"),
        (optimizer, "param_state_sharding_type"),
    ):
        if isinstance(source, Mapping) and source.get(key) is not None:
            return _named(str(source[key]))
    if not args:
        return OptimizerFormat.UNKNOWN
    if not args.get("use_distributed_optimizer"):
        return OptimizerFormat.MODEL_SPACE
    # Before core 0.13 nothing was noted; the format followed from this flag.
    if args.get("ckpt_fully_parallel_save"):
        return OptimizerFormat.FULLY_SHARDED_MODEL_SPACE
    return OptimizerFormat.DP_ZERO_GATHER_SCATTER


def _named(name: str) -> OptimizerFormat:
    known = {format_.value: format_ for format_ in OptimizerFormat}
    return known.get(name, OptimizerFormat.UNKNOWN)
