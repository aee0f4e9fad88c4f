"""torchrun alone, without a supervisor: one per node, with as many processes as the node has GPUs.

Two of them on this machine stand for a healthy node of two and a reduced one of one. NTP_TEST_NVRX
names a folder with nvidia-resiliency-ext and what it needs, whose ft_launcher then starts the same
job; without it that test is skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from flags import DISTRIBUTED, LLAMA, MODEL, tp
from ranks import ROOT, SCRIPT, free_port, run_training

NVRX = os.environ.get("NTP_TEST_NVRX")
FLAGS = [*MODEL, *LLAMA, *DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable", "--train-iters", "3"]
STEP = re.compile(r"iteration +(\d+)/.*?lm loss: (\S+)")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of every job: two steps from a checkpoint that plain Megatron saved after one."""
    folder = str(tmp_path_factory.mktemp("saved"))
    run_training([*FLAGS, "--save", folder, "--save-interval", "1", "--exit-interval", "1"], 1)
    return [*FLAGS, "--load", folder]


@pytest.fixture(scope="module")
def plain(loaded: list[str]) -> dict[int, float]:
    """Losses of plain Megatron at TP 1."""
    losses = run_training(loaded, 1).losses
    assert sorted(losses) == [2, 3]
    return losses


def run_nodes(
    launchers: Sequence[Sequence[str]], loaded: list[str], folder: Path, **environment: str
) -> list[str]:
    """Output of the launcher of each node; all must end well."""
    training = ["-m", "megatron_ntp", "run", "--cpu", str(SCRIPT), *loaded, *tp(2)]
    training += ["--ntp", "--ntp-degrees", "2,1"]
    processes = []
    for node, launcher in enumerate(launchers):
        environ = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [NVRX])]),
            "PYTHONWARNINGS": "ignore",
            "GROUP_RANK": str(node),
            **environment,
        }
        with (folder / f"{node}.log").open("w") as log:
            words = [sys.executable, "-m", *launcher, *training]
            process = subprocess.Popen(words, env=environ, stdout=log, stderr=subprocess.STDOUT)
            processes.append(process)
    try:
        statuses = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.terminate()
    outputs = [(folder / f"{node}.log").read_text() for node in range(len(launchers))]
    assert statuses == [0] * len(launchers), "\n".join(outputs)
    return outputs


def check(outputs: list[str], plain: dict[int, float]) -> None:
    """The last rank, on the reduced node, logs what plain Megatron logs."""
    losses = {int(step): float(loss) for step, loss in STEP.findall(outputs[-1])}
    assert losses == pytest.approx(plain, rel=1e-6)
    assert "nonuniform TP plan" in outputs[0]


def test_torchrun_with_another_number_of_processes_on_each_node(
    loaded: list[str], plain: dict[int, float], tmp_path: Path
) -> None:
    port = free_port()
    nodes = [
        f"torch.distributed.run --nnodes 2 --node-rank {node} --nproc-per-node {num_ranks} "
        f"--master-addr 127.0.0.1 --master-port {port}".split()
        for node, num_ranks in enumerate((2, 1))
    ]
    check(run_nodes(nodes, loaded, tmp_path), plain)


@pytest.mark.skipif(NVRX is None, reason="NTP_TEST_NVRX names no nvidia-resiliency-ext")
def test_ft_launcher_in_front(loaded: list[str], plain: dict[int, float], tmp_path: Path) -> None:
    port = free_port()
    config = tmp_path / "ft.yaml"
    config.write_text("fault_tolerance:\n  rank_heartbeat_timeout: 300\n")
    nodes = [
        "nvidia_resiliency_ext.fault_tolerance.launcher --nnodes 2 "
        f"--nproc-per-node {num_ranks} --local-addr 127.0.0.{1 + node} --rdzv-backend c10d "
        f"--rdzv-endpoint 127.0.0.1:{port} --max-restarts 0 --ft-cfg-path {config}".split()
        for node, num_ranks in enumerate((2, 1))
    ]
    check(run_nodes(nodes, loaded, tmp_path, TORCH_ELASTIC_WORKER_IDENTICAL="0"), plain)
