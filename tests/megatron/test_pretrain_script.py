"""scripts/pretrain_gpt.py on data of its own: an indexed dataset, and without masks in batches.

Its runs on mock data are in test_cpu_runtime.py. Needs the installed megatron-core only.
"""

from pathlib import Path

import pytest
from flags import DISTRIBUTED, LLAMA, MODEL, SHORT, tp
from ranks import run_ranks, run_training
from versions import CORES


def write_dataset(prefix: str) -> None:
    """In a rank: 200 documents in Megatron's format, each counting up by its own step."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for document in range(200):
        tokens = torch.arange(20 + document % 30) * (1 + document % 3) % 60
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("core", CORES)
def test_learns_from_an_indexed_dataset(core: Path | None, tmp_path: Path) -> None:
    prefix = str(tmp_path / "documents")
    run_ranks(write_dataset, 1, core=core, prefix=prefix)
    flags = [word for word in MODEL if word != "--mock-data"]
    data = ["--data-path", prefix, "--data-cache-path", str(tmp_path / "cache"), "--split", "1,0,0"]
    training = run_training(
        [*flags, *LLAMA, *DISTRIBUTED, *tp(2), *data, "--lr", "1e-2", "--train-iters", "12"],
        4,
        core=core,
    )
    assert training.losses[12] < 0.8 * training.losses[1]


def test_masks_made_by_attention_change_nothing() -> None:
    flags = [*MODEL, *LLAMA, *tp(2), *SHORT]
    with_masks = run_training(flags, 2)
    without = run_training([*flags, "--no-create-attention-mask-in-dataloader"], 2)
    assert without.losses == with_masks.losses


def test_what_it_does_not_know_is_not_ignored() -> None:
    run = run_training([*MODEL, *LLAMA, *tp(1), "--mtp-num-layers", "1"], 1, check=False)
    assert run.statuses == [1], run.describe()
    assert "this script does not know --mtp-num-layers: use pretrain_gpt.py of a" in run.stderr[0]
