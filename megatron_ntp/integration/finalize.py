"""Megatron's gradient finalization, minus what pre-sync has already done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ntp.integration import context


def allreduce_non_tensor_model_parallel_grads(
    original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Wraps the function of this name: partial gradients were summed before DP sync (TPSum)."""
    if context.current() is None:
        original(*args, **kwargs)
