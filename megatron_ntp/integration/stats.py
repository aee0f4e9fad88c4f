"""What a rank did so far, as one small JSON file: for `rehearse`, tests and people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ntp.atomic import write_atomically
from megatron_ntp.integration.context import NTPContext
from megatron_ntp.integration.ddp import NTPDistributedDataParallel
from megatron_ntp.integration.reshard import minimum_nbytes


def rank_statistics(
    ntp: NTPContext, chunks: list[NTPDistributedDataParallel], optimizer: Any
) -> dict[str, Any]:
    """Traffic since training began and memory now, of this rank. Bytes unless named otherwise.

    `minimum_bytes_per_step` is what the whole replica must move: each extra rank's own shard once
    each way, replicated parameters once.
    """
    minima = [minimum_nbytes(chunk.ntp_model) for chunk in chunks]
    return {
        "global_rank": ntp.global_rank,
        "replica": ntp.rank.replica,
        "dp_rank": ntp.rank.dp_rank,
        "tp_rank": ntp.rank.tp_rank,
        "degree": ntp.degree,
        "is_extra": ntp.is_extra,
        "steps": ntp.steps,
        "reshard_groups": sum(len(chunk.ntp_model.groups) for chunk in chunks),
        "exchanges": ntp.counters.exchanges,
        "tp_sums": ntp.counters.tp_sums,
        "bytes_sent": ntp.counters.bytes_sent,
        "checkpoint_bytes_read": ntp.checkpoint_nbytes_read,
        "blocked_seconds": ntp.counters.blocked_s,
        "minimum_bytes_per_step": {
            "gradients": sum(grads for grads, _ in minima),
            "parameters": sum(params for _, params in minima),
        },
        "optimizer_state_bytes": _optimizer_state_nbytes(optimizer),
        "gradient_bytes": {
            "own": sum(_nbytes(sp.compute.main_grad) for c in chunks for sp in c.ntp_model.params),
            "held_for_extra_ranks": sum(
                _nbytes(sp.sync.main_grad) - _nbytes(sp.compute.main_grad)
                for chunk in chunks
                for sp in chunk.ntp_model.params
                if sp.shares_storage and sp.sync is not None
            ),
        },
    }


def write(ntp: NTPContext, chunks: list[NTPDistributedDataParallel], optimizer: Any) -> None:
    """Writes the file of this rank into --ntp-stats-dir, whole or not at all."""
    folder = ntp.settings.ntp_stats_dir
    if folder is None:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    statistics = json.dumps(rank_statistics(ntp, chunks, optimizer), indent=1) + "\n"
    write_atomically(path / f"rank-{ntp.global_rank:05d}.json", statistics)


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _optimizer_state_nbytes(optimizer: Any) -> int:
    """Main parameters and moments that this rank holds."""
    total = 0
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state.get(param, {})
                total += _nbytes(param)
                total += sum(_nbytes(v) for v in state.values() if hasattr(v, "numel"))
    return total
