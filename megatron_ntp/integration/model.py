"""An uneven GPT model: rank-local sizes when it is built, and what each parameter is made of.

[Local sizes] Megatron and Transformer Engine divide sizes by the TP degree everywhere. A rank whose
replica has degree n and which owns k KV groups builds its model from a config that says k * n, so
that every division gives k. The logical sizes stay in args and in the plan.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from megatron_ntp.comm.packing import Segment
from megatron_ntp.errors import NTPError
from megatron_ntp.integration import context
from megatron_ntp.integration.refusals import refuse_config
from megatron_ntp.plan.model import ModelDims


def local_config(config: Any, ntp: context.NTPContext) -> Any:
    """A copy of a TransformerConfig with this rank's sizes. See [Local sizes]."""
    assert ntp.plan is not None
    _check_config(config, ntp.plan.model)
    degree = ntp.degree
    groups = ntp.local_units("kv_group")
    heads_per_group = ntp.plan.model.num_attention_heads // ntp.plan.model.num_query_groups
    local = copy.copy(config)
    local.tensor_model_parallel_size = degree
    local.num_query_groups = groups * degree
    local.num_attention_heads = groups * heads_per_group * degree
    local.kv_channels = ntp.plan.model.kv_channels
    local.ffn_hidden_size = ntp.local_units("ffn") * degree
    return local


def _check_config(config: Any, dims: ModelDims) -> None:
    refuse_config(config)
    found = (config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size)
    planned = (dims.num_attention_heads, dims.num_query_groups, dims.ffn_hidden_size)
    if found != planned:
        raise NTPError(
            "the model's config differs from the arguments that the plan was made from: "
            f"(heads, KV groups, ffn) are {found}, planned {planned}. One job trains one model"
        )


def gpt_model_init(
    original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps `GPTModel.__init__`: builds it from local sizes."""
    ntp = context.current()
    if ntp is None or ntp.plan is None:
        original(self, config, *args, **kwargs)
        return
    ntp.group("tp")  # raises where the loop has made groups of its own
    given = inspect.signature(original).bind(self, config, *args, **kwargs).arguments
    if given.get("parallel_output") is False:
        raise NTPError("GPTModel(parallel_output=False) gathers logits, which --ntp does not do")
    planned = ntp.plan.model.padded_vocab_size
    if given["vocab_size"] != planned:
        raise NTPError(
            f"GPTModel was given a vocabulary of {given['vocab_size']} rows, but the plan is for "
            f"{planned} (padded_vocab_size, with the padding that your loop adds)"
        )
    original(self, local_config(config, ntp), *args, **kwargs)


def language_module_init(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    """Wraps `LanguageModule.__init__`, where other models than GPT begin too (BERT, T5, Mamba)."""
    if context.current() is not None and not isinstance(self, GPTModel):
        raise NTPError(
            f"--ntp supports megatron.core's GPTModel, but the model is a {type(self).__name__}. "
            "Train it without --ntp"
        )
    original(self, *args, **kwargs)


@dataclass(frozen=True)
class ParamKind:
    """What a tensor-parallel parameter is made of.

    Attributes:
        family: unit family of the plan.
        dim: tensor dimension that TP cuts (0 column, 1 row).
        outer: blocks along `dim` that are each cut into units (2 for a gated fc1).
    """

    family: str
    dim: int
    outer: int = 1

    def segments(self, shape: torch.Size, local_units: int) -> tuple[Segment, ...]:
        """Segments of a local tensor of this kind that holds `local_units` units."""
        if self.dim == 0:
            rows = shape[0] // (self.outer * local_units)
            row_numel = shape.numel() // shape[0]
            return (Segment(self.outer, rows * row_numel),)
        return (Segment(shape[0], shape.numel() // shape[0] // local_units),)

    def unit_width(self, shape: torch.Size, local_units: int) -> int:
        """Elements of one unit along `dim`."""
        return shape[self.dim] // (self.outer * local_units)


def _kinds(gated: bool) -> tuple[tuple[re.Pattern[str], ParamKind], ...]:
    fc1_outer = 2 if gated else 1
    layer = r"decoder\.layers\.\d+\."
    rows = (
        (layer + r"self_attention\.linear_qkv\.(weight|bias)", ParamKind("kv_group", 0)),
        (layer + r"self_attention\.linear_proj\.weight", ParamKind("kv_group", 1)),
        (layer + r"mlp\.linear_fc1\.(weight|bias)", ParamKind("ffn", 0, fc1_outer)),
        (layer + r"mlp\.linear_fc2\.weight", ParamKind("ffn", 1)),
        (r"embedding\.word_embeddings\.weight", ParamKind("vocab", 0)),
        (r"output_layer\.(weight|bias)", ParamKind("vocab", 0)),
    )
    return tuple((re.compile(pattern), kind) for pattern, kind in rows)


# Replicated parameters, by full name: [whole] every TP rank computes the whole gradient,
# [partial] each TP rank sees its own heads only, so gradients add up over the TP group.
_WHOLE = re.compile(
    r"decoder\.layers\.\d+\.((input_layernorm|pre_mlp_layernorm)\.(weight|bias)"
    r"|(self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(weight|bias)"
    r"|self_attention\.linear_proj\.bias|mlp\.linear_fc2\.bias)"
    r"|decoder\.final_layernorm\.(weight|bias)|embedding\.position_embeddings\.weight"
)
_PARTIAL = re.compile(r"decoder\.layers\.\d+\.self_attention\.(q|k)_layernorm\.(weight|bias)")


@dataclass(frozen=True)
class ParamRole:
    """How NTP treats one parameter.

    Attributes:
        kind: what a TP parameter is made of; None if it is replicated.
        tp_partial: a replicated one's gradients are partial sums over the TP group.
    """

    kind: ParamKind | None
    tp_partial: bool = False


def classify(name: str, param: torch.nn.Parameter, gated: bool) -> ParamRole:
    """The role of a GPTModel parameter.

    Args:
        name: as in `GPTModel.named_parameters()`.
        param: the parameter itself.
        gated: whether the MLP is gated (`gated_linear_unit`).

    Raises:
        NTPError: naming a parameter that is not known to be exact.
    """
    for pattern, kind in _kinds(gated):
        if pattern.fullmatch(name):
            return ParamRole(kind)
    is_tp = bool(getattr(param, "tensor_model_parallel", False))
    if not is_tp and _WHOLE.fullmatch(name):
        return ParamRole(None)
    if not is_tp and _PARTIAL.fullmatch(name):
        return ParamRole(None, tp_partial=True)
    raise NTPError(
        f"parameter '{name}' {tuple(param.shape)} is not one that nonuniform TP can cut exactly: "
        "the model has a layer that --ntp does not support (supported: GPT with attention and "
        "dense MLP). Train it without --ntp"
    )


def layer_of(name: str) -> str:
    """The layer of a parameter, or "embedding" and "output" before and after the layers."""
    match = re.match(r"decoder\.layers\.(\d+)\.", name)
    if match:
        return f"layer {match.group(1)}"
    return "embedding" if name.startswith("embedding.") else "output"
