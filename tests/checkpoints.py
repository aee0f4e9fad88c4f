"""Small checkpoints as Megatron writes them, made without it.

    folder = checkpoints.Maker(tmp_path)
    folder.save(10)
    folder.save(20, optimizer="dp_reshardable", layout="0.17")

Files of a checkpoint are those of Megatron's `torch_dist` format: shard files and `.metadata` of
torch, `metadata.json`, and the state all ranks share, in a file of its own (core 0.17, 0.18) or
among the shards (0.19). The tracker names the last one saved.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

MODEL = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 4,
    "kv_channels": 2,
    "num_query_groups": 1,
    "group_query_attention": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "make_vocab_size_divisible_by": 8,
    "padded_vocab_size": 16,
}
SHARD = "__0_0.distcp"
_START = 1_000_000.0


class _Planner(dcp.DefaultSavePlanner):
    """Stores streams as they are, as Megatron's planner does."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)


@dataclass
class Maker:
    """A folder of checkpoints; each is a second younger than the one before."""

    path: Path
    clock: float = _START

    def save(
        self,
        iteration: int | None,
        optimizer: str | None = "fully_reshardable",
        layout: str = "0.19",
        tracker: bool = True,
        noted: bool = True,
        **args: Any,
    ) -> Path:
        """One whole checkpoint.

        Args:
            iteration: Its iteration; None for a release.
            optimizer: Format of the optimizer state; None for none.
            layout: Version of Megatron whose files it has.
            tracker: Whether the tracker is moved to it.
            noted: Whether it says what its optimizer format is, as it does since core 0.13.
            args: Megatron's arguments to store, over those of a job of TP 2, DP 2.
        """
        name = "release" if iteration is None else f"iter_{iteration:07d}"
        path = self.path / name
        path.mkdir(parents=True)
        common = self._common(iteration, optimizer, noted, args)
        state: dict[str, Any] = {
            "decoder.weight": torch.arange(96.0).view(12, 8),
            "embedding.word_embeddings.weight": torch.arange(128.0).view(16, 8),
        }
        if optimizer is not None:
            state["optimizer.state.exp_avg.decoder.weight"] = torch.ones(12, 8)
        if layout == "0.19":
            stream = io.BytesIO()
            torch.save([common], stream)
            state["common_state/shard_0_1"] = stream
        else:
            torch.save(common, path / "common.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=str(path), planner=_Planner(), no_dist=True)
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (path / "metadata.json").write_text(json.dumps(marker))
        self.clock += 1
        for file in path.iterdir():
            os.utime(file, (self.clock, self.clock))
        if tracker:
            self.track("release" if iteration is None else str(iteration))
        return path

    def track(self, text: str) -> None:
        """Writes the tracker, now."""
        self.clock += 1
        path = self.path / "latest_checkpointed_iteration.txt"
        path.write_text(text)
        os.utime(path, (self.clock, self.clock))

    def _common(
        self, iteration: int | None, optimizer: str | None, noted: bool, args: dict[str, Any]
    ) -> dict[str, Any]:
        stored = {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "data_parallel_size": 2,
            "world_size": 4,
            "use_distributed_optimizer": optimizer != "model_space",
            "consumed_train_samples": 8 * (iteration or 0),
            **MODEL,
            **args,
        }
        common: dict[str, Any] = {
            "args": argparse.Namespace(**stored),
            "iteration": iteration or 0,
            "checkpoint_version": 3.0,
        }
        if noted:
            kind = {} if optimizer == "model_space" else {"distrib_optim_sharding_type": optimizer}
            common["content_metadata"] = kind
        return common


def write_hashes(path: Path) -> None:
    """`integrity.json`, as Megatron's --verify-integrity writes it."""
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
    (path / "integrity.json").write_text(json.dumps({"algorithm": "sha256", "files": files}))


def truncate(path: Path, num_bytes: int) -> None:
    """Cuts bytes off the end of a file."""
    os.truncate(path, path.stat().st_size - num_bytes)


def flip_bit(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def content_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All files below a folder: modification time and content."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
