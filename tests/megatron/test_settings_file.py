"""A settings file in a real run: it takes effect, is printed, and is kept in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_training
from versions import CORES

ARGV = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 4 --kv-channels 4 --ffn-hidden-size 24
    --seq-length 8 --max-position-embeddings 8 --vocab-size 30 --make-vocab-size-divisible-by 16
    --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-2 --min-lr 1e-2 --mock-data
    --tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 --log-interval 1
    --eval-iters 0 --eval-interval 1000 --use-distributed-optimizer
    --dist-ckpt-optim-fully-reshardable --tensor-model-parallel-size 2 --ntp
"""


def saved_arguments(checkpoint: str) -> dict[str, Any]:
    """The --ntp arguments in a checkpoint, as Megatron reads them."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    kept = load_common_state_dict(checkpoint)["args"]
    return {name: value for name, value in vars(kept).items() if name.startswith("ntp")}


@pytest.mark.slow
@pytest.mark.parametrize("core", CORES)
def test_a_settings_file_is_used_printed_and_kept(core: Path | None, tmp_path: Path) -> None:
    config = tmp_path / "ntp.yaml"
    config.write_text("ntp-degrees: 2,1\nntp-bucket-size: 500\nntp-start-timeout: 90\n")
    save = tmp_path / "checkpoints"
    argv = [*ARGV.split(), "--ntp-config", str(config), "--ntp-start-timeout", "120"]
    argv += ["--save", str(save), "--save-interval", "2"]
    run = run_training(
        argv, 3, core=core, after=saved_arguments, checkpoint=str(save / "iter_0000002")
    )
    assert list(run.losses) == [1, 2]
    kept = run.results[0]
    assert kept["ntp"] is True and kept["ntp_degrees"] == "2,1", "from the file"
    assert kept["ntp_start_timeout"] == 120.0, "the command line wins"
    assert kept["ntp_bucket_size"] == 500 and kept["ntp_config"] == str(config)
    assert all(value is None or type(value) in (bool, int, float, str) for value in kept.values())
    printed = [line.split() for line in run.stdout[0].splitlines() if line.startswith("  ntp_")]
    shown = {words[0]: words[-1] for words in printed}
    assert shown["ntp_degrees"] == "2,1" and shown["ntp_bucket_size"] == "500"
    assert set(shown) >= {name for name in kept if name != "ntp"}


@pytest.mark.slow
def test_a_wrong_settings_file_stops_with_one_message(tmp_path: Path) -> None:
    config = tmp_path / "ntp.yaml"
    config.write_text("ntp-degres: 2,1\n")
    run = run_training([*ARGV.split(), "--ntp-config", str(config)], 3, check=False)
    assert all(status != 0 for status in run.statuses)
    errors = "".join(run.stderr)
    assert errors.count("there is no setting 'ntp-degres'. Did you mean ntp-degrees?") == 1
    assert "SettingsFileError" not in errors, "a message, no traceback of it"
