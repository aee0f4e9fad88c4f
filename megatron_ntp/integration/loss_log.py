"""Every step's loss at full precision, as JSON lines, whether or not nonuniform TP is on.

Megatron prints seven digits, and after a resume the mean of two steps; comparing two runs step by
step needs more. `megatron-ntp run --loss-log FILE` puts one observer around Megatron's own log
function. It changes nothing that Megatron computes, and the catalog of nonuniform TP has no part in
it: a plain run stays plain.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from megatron_ntp.integration.catalog import TESTED
from megatron_ntp.patching.registry import Registry
from megatron_ntp.patching.rows import Expected, Patch

ROWS = (
    Patch(
        name="loss_log",
        target="megatron.training.training:training_log",
        replacement=f"{__name__}:training_log",
        reason="writes each step's loss at full precision",
        versions=TESTED,
        signature=(Expected(("loss_dict", "iteration", "skipped_iter", "grad_norm")),),
    ),
)

_path: Path | None = None
_file: TextIO | None = None


def install(path: str | os.PathLike[str]) -> Registry:
    """Observe this process's training. The last rank, which is the one that logs, writes."""
    global _path
    from megatron.core import package_info

    _path = Path(path)
    return Registry("megatron", package_info.__version__, ROWS).apply()


def training_log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps `megatron.training.training.training_log`, which every rank calls once per step."""
    result = original(*args, **kwargs)
    if dist.get_rank() == dist.get_world_size() - 1:
        _write(inspect.signature(original).bind(*args, **kwargs).arguments)
    return result


def _write(step: dict[str, Any]) -> None:
    global _file
    if _file is None:
        assert _path is not None
        _path.parent.mkdir(parents=True, exist_ok=True)
        _file = _path.open("a", encoding="utf-8")
    grad_norm = step["grad_norm"]
    line = {
        "step": int(step["iteration"]),
        "losses": {name: float(value) for name, value in step["loss_dict"].items()},
        "grad_norm": None if grad_norm is None else float(grad_norm),
        "skipped": bool(step["skipped_iter"]),
    }
    # One write per line: whoever follows the file, or reads it after a kill, sees whole lines.
    _file.write(json.dumps(line) + "\n")
    _file.flush()
