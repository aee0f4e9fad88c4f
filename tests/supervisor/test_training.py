"""What a training command says, and what is added to it."""

import sys
from pathlib import Path

import pytest

from megatron_ntp.errors import UnsupportedFlagError
from megatron_ntp.launchers.nodes import Node, Placement, Shape, Slot, place
from megatron_ntp.plan.model import ModelDims
from megatron_ntp.supervisor import training
from megatron_ntp.supervisor.training import Training

PYTHON = sys.executable
SAVING = "--save ckpt --load ckpt"
SIZES = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 2 "
    "--global-batch-size 16 --num-layers 2 --hidden-size 64 --num-attention-heads 8 "
    "--vocab-size 500 --make-vocab-size-divisible-by 64 --ntp-batch-policy=shrink"
)


def read(words: str, shape: Shape | None = None) -> Training:
    return training.read(words.split(), shape or Shape(0, 0, 0, 8, 3), False, 1)


def placement(dead: bool) -> Placement:
    slots = (Slot(None, "dead") if dead else Slot("0"), Slot("1"))
    return place([Node("n1", slots)], Shape(2, gpus_per_node=2))


def test_sizes_and_terms() -> None:
    found = read(f"pretrain_gpt.py {SIZES} {SAVING} --ntp")
    assert found.shape == Shape(4, 2, 1, 8, 3)
    assert found.nonuniform and found.says_steps
    assert (found.save, found.load) == (Path("ckpt"), Path("ckpt"))
    terms = found.terms
    assert (terms.batch_policy, terms.micro_batch, terms.batches) == ("shrink", 2, (16,))
    assert terms.dims == ModelDims(8, 8, 8, 64, 256, 512, 2)


def test_given_sizes_win() -> None:
    assert read(f"run.sh {SIZES}", Shape(8, 0, 2, 8)).shape == Shape(8, 2, 2, 8)
    assert read("run.sh", Shape(0, 0, 0, 8)).shape == Shape(1, 1, 1, 8)


def test_a_flag_may_have_the_name_of_a_launcher() -> None:
    assert read("p.py --launcher torchrun").words == (PYTHON, "p.py", "--launcher", "torchrun")


def test_a_ramp_up_passes_through_its_batches() -> None:
    words = "pretrain_gpt.py --micro-batch-size 1 --global-batch-size 16 --rampup-batch-size 4 4 99"
    assert read(words).terms.batches == (4, 8, 12, 16)


@pytest.mark.parametrize(
    ("words", "command", "says_steps"),
    [
        ("pretrain.py --ntp", [PYTHON, "-m", "megatron_ntp", "run", "pretrain.py", "--ntp"], True),
        ("pretrain.py --lr 1", [PYTHON, "pretrain.py", "--lr", "1"], False),
        (
            "-m megatron_ntp run p.py",
            [PYTHON, "-m", "megatron_ntp", "run", "p.py"],
            True,
        ),
        ("./run.sh x", ["./run.sh", "x"], False),
    ],
)
def test_how_ranks_are_started(words: str, command: list[str], says_steps: bool) -> None:
    found = read(words)
    assert found.command(placement(False), False) == command and found.says_steps == says_steps


def test_failed_slots_and_a_start_from_scratch_are_added() -> None:
    found = read(f"pretrain.py --ntp {SAVING}")
    command = found.command(placement(True), may_begin_anew=True)
    assert command[-4:] == ["--ntp-failed", "0:0", "--ntp-load", "or-scratch"]
    assert "--ntp-load" not in found.command(placement(True), may_begin_anew=False)


@pytest.mark.parametrize(
    "words", [f"p.py --ntp {SAVING} --ntp-load model-only", "p.py --ntp", f"p.py {SAVING}"]
)
def test_a_start_from_scratch_is_not_added_where_it_has_no_place(words: str) -> None:
    command = read(words).command(placement(False), may_begin_anew=True)
    assert "or-scratch" not in command


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "after a lone --"),
        ("p.py --ntp --ntp-failed 0:1", "remove --ntp-failed"),
        ("p.py --ntp --ntp-degrees 2,1", "remove --ntp-degrees"),
        ("p.py --ntp --ntp-plan x.json", "remove --ntp-plan"),
        ("p.py --save a", "Add --load a"),
        ("p.py --save a --load b", "--pretrained-checkpoint b"),
        (f"p.py {SAVING} --ckpt-step 5", "remove --ckpt-step .* latest_checkpointed_iteration"),
        (f"p.py {SAVING} --finetune", "remove --finetune .* as --pretrained-checkpoint"),
        (f"p.py {SAVING} --no-load-optim", "remove --no-load-optim .* --ntp-load model-only"),
        (f"p.py {SAVING} --override-ckpt-iteration 5", "remove --override-ckpt-iteration"),
        ("p.py --ntp --ntp-batch-policy wrong", "wrong"),
        ("p.py --tensor-model-parallel-size two", "no number: 'two'"),
    ],
)
def test_commands_that_cannot_be_restarted(words: str, told: str) -> None:
    with pytest.raises(UnsupportedFlagError, match=told):
        read(words)


def test_failed_slots_need_ntp() -> None:
    with pytest.raises(UnsupportedFlagError, match="add --ntp"):
        read("p.py").command(placement(True), False)


def test_checkpoints_that_are_there(tmp_path: Path) -> None:
    found = read(f"p.py --ntp --save {tmp_path} --load {tmp_path}")
    assert found.newest_checkpoint() == -1 and not found.has_saved()
    (tmp_path / "iter_0000003").mkdir()
    assert found.newest_checkpoint() == -1 and not found.has_saved(), "torn, before any tracker"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert found.has_saved()
    assert read("p.py --ntp").newest_checkpoint() == -1
