"""The job that meets chaos: a tiny GPT on CPU ranks, 2 replicas at TP 2, saving every 4 steps.

All jobs go on from one checkpoint of plain Megatron at TP 1, so that weights of different TP
degrees can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"

TP, NUM_REPLICAS = 2, 2
FIRST_STEP = 4  # steps in the checkpoint that all start from
LAST_STEP = 21
SAVE_EVERY = 4
PADDED_VOCAB = 56
LOSS = "lm loss"
LOSS_TOLERANCE = 1e-5
SPREADS = 3.0
FP32_FLOOR = 2.5e-7  # two roundings: plain runs that agree to the last bit prove no smaller spread
START_TP = 1

Tensors = dict[str, torch.Tensor]

_FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 8 --group-query-attention
    --num-query-groups 4 --kv-channels 4 --ffn-hidden-size 48 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8
    --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --seed 7
    --mock-data --tokenizer-type NullTokenizer --vocab-size 50 --attention-dropout 0
    --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist
"""


def flags(tp: int, checkpoints: Path) -> list[str]:
    """Megatron's flags of a job that loads from and saves to one folder."""
    return [
        *_FLAGS.split(),
        *("--tensor-model-parallel-size", str(tp)),
        *("--make-vocab-size-divisible-by", str(PADDED_VOCAB // tp)),
        *("--train-iters", str(LAST_STEP)),
        *("--save", str(checkpoints), "--load", str(checkpoints)),
        *("--save-interval", str(SAVE_EVERY)),
    ]


def run_words(losses: Path, flags_: list[str]) -> list[str]:
    """What a rank runs, after `python -m megatron_ntp`."""
    return ["run", "--cpu", "--loss-log", str(losses), str(SCRIPT), *flags_]


def logged(losses: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line of a loss log, also of steps that were done again."""
    if not losses.exists():
        return []
    lines = losses.read_text().splitlines(keepends=True)
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(int(entry["step"]), float(entry["losses"][LOSS])) for entry in entries]


def final_checkpoint(checkpoints: Path) -> Path:
    return checkpoints / f"iter_{LAST_STEP:07d}"


def weights(checkpoint: Path) -> Tensors:
    """Full parameters of the model, whatever ranks have saved it."""
    stored = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    state: Tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata) and not key.startswith("optimizer.")
    }
    dcp.load(state, checkpoint_id=str(checkpoint), no_dist=True)
    return {key: value for key, value in state.items() if value.is_floating_point()}


def distance(ours: Tensors, theirs: Tensors) -> float:
    """The largest difference of an element over the largest element, of the worst parameter."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    return max(
        float((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in ours
    )


@dataclass(frozen=True)
class Reference:
    """Where plain Megatron ends that nothing happens to.

    Attributes:
        start: folder with the checkpoint that jobs start from.
        losses: by step, of TP 2 x DP 2.
        weights: of the same job at the end.
        degrees: TP degrees of the plain jobs.
        spread: how far these are apart at the end, see `distance`.
        seconds: that making it took.
    """

    start: Path
    losses: Mapping[int, float]
    weights: Tensors
    degrees: tuple[int, ...]
    spread: float
    seconds: float

    @classmethod
    def read(cls, folder: Path, seconds: float) -> Reference:
        """What `chaos_kit.reference` has left in a folder."""
        degrees = tuple(sorted(int(path.name[2:]) for path in folder.glob("tp?")))
        ends = {tp: weights(final_checkpoint(folder / f"tp{tp}")) for tp in degrees}
        apart = [distance(a, b) for a, b in combinations(ends.values(), 2)]
        losses = dict(logged(folder / f"tp{TP}.losses"))
        assert list(losses) == list(range(FIRST_STEP + 1, LAST_STEP + 1)), losses
        spread = max(FP32_FLOOR, *apart)
        return cls(folder / "start", losses, ends[TP], degrees, spread, seconds)
