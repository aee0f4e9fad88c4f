"""The real pretrain_gpt.py of a Megatron-LM checkout trains at degrees 2+1 as plain Megatron does.

Two ways in: `megatron-ntp run` on the unmodified checkout, and plain Python on a patched one. Runs
when MEGATRON_LM_PATH names a checkout (or several, separated as in PATH), which is copied. Each
tree costs about 3 minutes on 2 cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, free_port, run_training

from megatron_ntp.patching.cli import patch_main
from megatron_ntp.patching.versions import in_range, read_core_version

GIVEN = [Path(part) for part in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if part]
TREES = [path for path in GIVEN if in_range(read_core_version(path), ">=0.17,<0.20")]

if not TREES:
    pytest.skip(
        "set MEGATRON_LM_PATH to a Megatron-LM checkout of core 0.17 to 0.19 to run this level",
        allow_module_level=True,
    )

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 40 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
    --seq-length 16 --max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 32
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant --clip-grad 1.0
    --train-iters 3 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --seed 7
""".split()
NTP = ["--tensor-model-parallel-size", "2", "--ntp", "--ntp-degrees", "2,1"]

# What `torchrun pretrain_gpt.py` runs in each rank, on a machine without GPUs.
PLAIN_PYTHON = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
from megatron_ntp import cpu_runtime
cpu_runtime.install()
sys.argv += cpu_runtime.cpu_arguments()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module", params=TREES, ids=lambda path: path.name)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a checkout, without its history."""
    copy = tmp_path_factory.mktemp("checkout") / "Megatron-LM"
    shutil.copytree(request.param, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return copy


@pytest.fixture(scope="module")
def loaded(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of every job: they go on from one checkpoint of plain Megatron."""
    folder = str(tmp_path_factory.mktemp("saved"))
    saved = ["--save", folder, "--save-interval", "1", "--exit-interval", "1"]
    run_training([*FLAGS, *saved], 1, script=tree / "pretrain_gpt.py", core=tree)
    return [*FLAGS, "--load", folder]


@pytest.fixture(scope="module")
def uniform_losses(tree: Path, loaded: list[str]) -> dict[int, float]:
    run = run_training(loaded, 2, script=tree / "pretrain_gpt.py", core=tree)
    assert sorted(run.losses) == [2, 3]
    return run.losses


def check(losses: dict[int, float], uniform_losses: dict[int, float]) -> None:
    assert sorted(losses) == sorted(uniform_losses)
    for step, loss in uniform_losses.items():
        assert losses[step] == pytest.approx(loss, rel=1e-6)


def test_run_command_on_the_unmodified_script(
    tree: Path, loaded: list[str], uniform_losses: dict[int, float]
) -> None:
    run = run_training([*loaded, *NTP], 3, script=tree / "pretrain_gpt.py", core=tree)
    check(run.losses, uniform_losses)
    assert "nonuniform TP plan" in run.stdout[0]


def test_plain_python_on_the_patched_checkout(
    tree: Path, loaded: list[str], uniform_losses: dict[int, float], tmp_path: Path
) -> None:
    assert patch_main(["apply", "--allow-installed-core", str(tree)]) == 0
    try:
        outputs = start_plainly(tree, [*loaded, *NTP], 3, tmp_path)
    finally:
        assert patch_main(["revert", str(tree)]) == 0
    check(losses_of(outputs[-1]), uniform_losses)
    assert "nonuniform TP plan" in outputs[0]


def test_patched_checkout_stops_with_one_message(tree: Path, tmp_path: Path) -> None:
    assert patch_main(["apply", "--allow-installed-core", str(tree)]) == 0
    try:
        output = start_plainly(tree, [*FLAGS, "--ntp-degrees", "2,1"], 1, tmp_path, status=1)[0]
    finally:
        assert patch_main(["revert", str(tree)]) == 0
    assert "megatron-ntp: error: --ntp-degrees without --ntp" in output
    assert "Traceback" not in output


def start_plainly(
    tree: Path, flags: list[str], num_ranks: int, folder: Path, status: int = 0
) -> list[str]:
    """What each rank of a job printed that plain Python runs; rank 0 keeps the store."""
    port = free_port()
    words = [sys.executable, "-W", "ignore", "-c", PLAIN_PYTHON, str(tree / "pretrain_gpt.py")]
    processes = []
    for rank in range(num_ranks):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen([*words, *flags], env=environment, stdout=log, stderr=log)
            )
    try:
        statuses = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    outputs = [(folder / f"{rank}.log").read_text() for rank in range(num_ranks)]
    assert statuses == [status] * num_ranks, "\n".join(output[-2000:] for output in outputs)
    return outputs


def losses_of(output: str) -> dict[int, float]:
    from ranks import _ITERATION

    return {int(match["step"]): float(match["loss"]) for match in _ITERATION.finditer(output)}
