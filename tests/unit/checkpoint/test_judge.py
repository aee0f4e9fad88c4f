"""A whole checkpoint that is not for this job is refused with the cure."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import MODEL, Maker

from megatron_ntp.checkpoint.examine import Checkpoint, examine
from megatron_ntp.checkpoint.folder import Candidate
from megatron_ntp.checkpoint.judge import Wanted, require_loadable
from megatron_ntp.errors import CheckpointError


def wanted(**changes: Any) -> Wanted:
    values: dict[str, Any] = {
        "tp": 2, "pp": 1, "degrees": (2, 1), "load_optimizer": True, "model": MODEL,
    }  # fmt: skip
    return Wanted(**{**values, **changes})


def saved(tmp_path: Path, optimizer: str | None = "fully_reshardable", **args: Any) -> Checkpoint:
    return examine(Candidate(Maker(tmp_path).save(1, optimizer, **args), 1))


@pytest.mark.parametrize("optimizer", ["fully_reshardable", "model_space"])
@pytest.mark.parametrize("degrees", [(2, 1), (2, 2), (1, 1)])
def test_formats_that_any_job_reads(
    tmp_path: Path, optimizer: str, degrees: tuple[int, ...]
) -> None:
    require_loadable(saved(tmp_path, optimizer), wanted(degrees=degrees))


@pytest.mark.parametrize(
    "optimizer",
    ["dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_model_space", "fsdp_dtensor"],
)
def test_formats_that_a_reduced_job_cannot_read(tmp_path: Path, optimizer: str) -> None:
    checkpoint = saved(tmp_path, optimizer)
    with pytest.raises(CheckpointError) as caught:
        require_loadable(checkpoint, wanted())
    message = str(caught.value)
    assert f"'{optimizer}', saved at TP 2, PP 1" in message
    assert "TP degrees are 2,1" in message
    assert "--dist-ckpt-optim-fully-reshardable" in message
    assert "--ntp-load model-only" in message
    require_loadable(checkpoint, wanted(load_optimizer=False))


def test_a_healthy_job_reads_the_default_format_at_its_own_degree(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "dp_reshardable")
    require_loadable(checkpoint, wanted(degrees=(2, 2, 2)))
    for other in (wanted(tp=4, degrees=(4, 4)), wanted(pp=2, degrees=(2, 2))):
        with pytest.raises(CheckpointError, match="dp_reshardable"):
            require_loadable(checkpoint, other)


def test_no_optimizer_state(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, None)
    with pytest.raises(CheckpointError, match=r"no optimizer state.*--ntp-load model-only"):
        require_loadable(checkpoint, wanted())
    require_loadable(checkpoint, wanted(load_optimizer=False))


@pytest.mark.parametrize("name, value", [
    ("num_layers", 3), ("hidden_size", 16), ("num_attention_heads", 8), ("swiglu", False),
    ("normalization", "LayerNorm"), ("padded_vocab_size", 24),
])  # fmt: skip
@pytest.mark.parametrize("load_optimizer", [True, False])
def test_another_model(tmp_path: Path, name: str, value: Any, load_optimizer: bool) -> None:
    asked = wanted(model={**MODEL, name: value}, load_optimizer=load_optimizer)
    with pytest.raises(CheckpointError) as caught:
        require_loadable(saved(tmp_path), asked)
    assert f"{name} is {MODEL[name]} in the checkpoint, {value} in the flags" in str(caught.value)


def test_query_groups_count_only_where_they_are_used(tmp_path: Path) -> None:
    other = {**MODEL, "num_query_groups": 2}
    require_loadable(saved(tmp_path / "a"), wanted(model=other))
    grouped = {**other, "group_query_attention": True}
    with pytest.raises(CheckpointError, match="num_query_groups is 1"):
        checkpoint = saved(tmp_path / "b", group_query_attention=True)
        require_loadable(checkpoint, wanted(model=grouped))


def test_padding_of_the_vocabulary_may_differ_where_tp_does(tmp_path: Path) -> None:
    padded = {**MODEL, "padded_vocab_size": 32}
    require_loadable(saved(tmp_path), wanted(tp=4, degrees=(4, 3), model=padded))
    otherwise = {**padded, "make_vocab_size_divisible_by": 16}
    require_loadable(saved(tmp_path / "b"), wanted(model=otherwise))


def test_what_a_checkpoint_does_not_say_is_not_compared(tmp_path: Path) -> None:
    require_loadable(saved(tmp_path), wanted(model={**MODEL, "of_tomorrow": 1}))


def test_a_legacy_checkpoint_comes_with_the_conversion(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000001"
    (path / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        require_loadable(examine(Candidate(path, 1)), wanted())
    message = str(caught.value)
    assert "format 'torch'" in message
    assert f"--load {tmp_path} --ckpt-format torch --ckpt-convert-format torch_dist" in message
    assert "--ckpt-convert-save" in message
