"""The model sizes that a plan depends on, and the families of units cut from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Self

from megatron_ntp.errors import PlanDimsError, PlanLookupError
from megatron_ntp.plan._checks import require_int

FAMILIES = ("kv_group", "ffn", "vocab")
"""KV groups with their query heads, FFN columns (pairs, if gated), vocabulary rows."""


def num_mlp_matrices(args: argparse.Namespace) -> int:
    """`ModelDims.mlp_matrices` of the model that Megatron's arguments describe."""
    return 3 if args.swiglu or args.quick_geglu else 2


@dataclass(frozen=True)
class ModelDims:
    """Logical sizes: those of the whole model, before any tensor parallelism.

    `padded_vocab_size` is padded once, for the nominal TP. `mlp_matrices` is 2, or 3 for a gated
    MLP, and only weighs the estimate of slowness.
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    hidden_size: int
    ffn_hidden_size: int
    padded_vocab_size: int
    num_layers: int
    mlp_matrices: int = 2

    def __post_init__(self) -> None:
        for name, value in self.sizes():
            require_int(name, value, minimum=1, error=PlanDimsError)
        if self.num_attention_heads % self.num_query_groups:
            raise PlanDimsError(
                f"num_attention_heads must be a multiple of num_query_groups, got "
                f"{self.num_attention_heads} and {self.num_query_groups}: a KV group is cut as one "
                "unit together with its query heads"
            )
        if self.mlp_matrices not in (2, 3):
            raise PlanDimsError(
                f"mlp_matrices must be 2, or 3 for a gated MLP, got {self.mlp_matrices}"
            )

    def sizes(self) -> tuple[tuple[str, int], ...]:
        """(name, value) of every size, in order of declaration."""
        return tuple((item.name, getattr(self, item.name)) for item in fields(self))

    def differences(self, other: Self) -> tuple[tuple[str, int, int], ...]:
        """(name, own value, other's value) of every size that differs."""
        return tuple(
            (name, value, getattr(other, name))
            for name, value in self.sizes()
            if value != getattr(other, name)
        )

    def num_units(self, family: str) -> int:
        """Units of a family, over the whole model width."""
        require_family(family)
        return {
            "kv_group": self.num_query_groups,
            "ffn": self.ffn_hidden_size,
            "vocab": self.padded_vocab_size,
        }[family]

    def unit_cost(self, family: str) -> int:
        """Multiply-adds per token for one unit of a family, over all layers, up to a factor.

        Counted as the elements of the weight matrices. A KV group: QKV rows of its query heads, key
        and value, and as many projection columns as query heads. A vocabulary row: the output
        layer once, the embedding being a lookup. Attention scores are left out.
        """
        require_family(family)
        heads_per_group = self.num_attention_heads // self.num_query_groups
        per_group = (2 * heads_per_group + 2) * self.kv_channels
        return {
            "kv_group": self.num_layers * per_group * self.hidden_size,
            "ffn": self.num_layers * self.mlp_matrices * self.hidden_size,
            "vocab": self.hidden_size,
        }[family]

    def cost(self, degree: int) -> int:
        """Work of TP rank 0 at this degree, which owns the most of every family: unit costs."""
        return sum(-(-self.num_units(name) // degree) * self.unit_cost(name) for name in FAMILIES)


def require_family(family: str) -> None:
    """Raise PlanLookupError unless there is a family of this name."""
    if family not in FAMILIES:
        raise PlanLookupError(f"no family {family!r}; families are {', '.join(FAMILIES)}")
