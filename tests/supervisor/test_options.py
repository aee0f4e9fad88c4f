"""The command line, and Slurm's variables in its place."""

from pathlib import Path

import pytest

from megatron_ntp import cli
from megatron_ntp.errors import PlanError
from megatron_ntp.launchers.nodes import Shape
from megatron_ntp.supervisor import options

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_NNODES": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_STEP_NODELIST": "n[1-4]",
}


def test_one_node() -> None:
    found = options.read(["--gpus-per-node", "4"], {})
    assert (found.num_nodes, found.node_rank, found.endpoint) == (1, 0, None)
    assert found.shape == Shape(0, 0, 0, 4) and not found.regrow_at_checkpoint


def test_given_nodes() -> None:
    words = "--nnodes 2 --node-rank 1 --rdzv-endpoint n1:29400 --gpus-per-node 8 --replicas 3"
    found = options.read(words.split(), SLURM)
    assert (found.num_nodes, found.node_rank, found.endpoint) == (2, 1, ("n1", 29400))
    assert found.shape.num_replicas == 3


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames n[1-4]" ] && echo n1\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = options.read([], SLURM)
    assert (found.num_nodes, found.node_rank, found.endpoint) == (4, 2, ("n1", 20084))
    assert found.shape.gpus_per_node == 8
    assert options.read([], {**SLURM, "SLURM_GPUS_PER_NODE": "h100:6"}).shape.gpus_per_node == 6


def test_both_names_of_regrow() -> None:
    for flag in ("--regrow-at", "--ntp-regrow-at"):
        words = ["--gpus-per-node", "1", flag, "checkpoint"]
        assert options.read(words, {}).regrow_at_checkpoint


@pytest.mark.parametrize(
    ("words", "environ", "told"),
    [
        ("", {}, "--gpus-per-node"),
        ("--gpus-per-node 8 --nnodes 2 --node-rank 2", {}, "is none of --nnodes 2"),
        ("--gpus-per-node 8 --nnodes 2", {}, "give --rdzv-endpoint"),
        ("--gpus-per-node 8 --nnodes 2 --rdzv-endpoint n1", {}, "expected HOST:PORT"),
        ("--gpus-per-node 8 --nnodes 2 --rdzv-endpoint n1:x", {}, "expected HOST:PORT"),
    ],
)
def test_what_is_missing_is_said(words: str, environ: dict[str, str], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        options.read(words.split(), environ)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--gpus-per-node 2", "give the training command after a lone --"),
        ("--gpus-per-node 2 -- p.py --save a --load b", "--pretrained-checkpoint b"),
        ("--gpus-per-node 2 --job-id a/b -- p.py", "names a folder"),
        ("--gpus-per-node 2 --run-dir /dev/null/runs -- p.py", "with --run-dir"),
        ("--gpus-per-node 2 -- torchrun --nproc-per-node 2 p.py", "remove torchrun"),
        ("--gpus-per-node 2 -- python -m torch.distributed.run p.py", "launch itself starts"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    words: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", *words.split()]) == 2
    said = capsys.readouterr().err
    assert told in said and len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing was started, nothing is left"
