"""Megatron's own loop on a real Slurm: a rank is killed, its GPU reported, the job goes on.

Two nodes of two GPUs train TP2 x DP2 on the CPU runtime. The restart runs at degrees 1 and 2 from
the newest checkpoint.
"""

import contextlib
import os
import re
import signal

import psutil
import pytest
from cluster import wait_for
from conftest import ROOT, Site

ITERATIONS = 45
TRAIN = f"""
    -m megatron_ntp run --cpu {ROOT / "scripts" / "pretrain_gpt.py"}
    --tensor-model-parallel-size 2 --num-layers 1 --hidden-size 16 --num-attention-heads 4
    --kv-channels 4 --ffn-hidden-size 24 --seq-length 8 --max-position-embeddings 8
    --vocab-size 30 --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 4
    --train-iters {ITERATIONS} --lr 1e-2 --min-lr 1e-2 --mock-data --tokenizer-type NullTokenizer
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --exit-signal-handler
    --save checkpoints --load checkpoints --save-interval 3 --ntp
"""
STEP = re.compile(r"iteration +(\d+)/ +\d+ .*lm loss: ([0-9.E+-]+)")


def rank_process(folder: str, rank: int) -> psutil.Process:
    """The training process of a rank, of the job in this folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            ours = process.cwd() == folder and words[1:3] == ["-m", "megatron_ntp"]
            if ours and process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"no process of rank {rank}")


def steps(log: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in STEP.findall(log)}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_megatron_goes_on_at_the_reduced_degree(site: Site) -> None:
    tracker = site.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    job_id = site.submit(" ".join(TRAIN.split()))

    def going() -> bool:
        state = site.cluster.job(job_id)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), site.output(job_id)
        return tracker.exists()

    wait_for("the first checkpoint", going, 700)
    (site.folder / "faults.txt").write_text("n1 1 XID 79\n")
    os.kill(rank_process(str(site.folder), 1).pid, signal.SIGKILL)
    ended = site.cluster.wait_for_end(job_id, 700)
    output = site.output(job_id)
    assert ended["ExitCode"] == "0:0", output
    assert re.search(r"attempt 1 ended with status [1-9]", output), "peers may end before it"
    first, second = site.ranks(job_id, 1), site.ranks(job_id, 2)
    assert list(second) == ["00.n2", "01.n2", "02.n1"]
    before, after = steps(first["03.n2"]), steps(second["02.n1"])
    assert max(after) == ITERATIONS and 3 <= min(after) - 1 <= max(before)
    assert (min(after) - 1) % 3 == 0, "it went on from a checkpoint"
    assert "ntp_failed" in second["00.n2"] and "0:1" in second["00.n2"]
    assert all(0 < loss < 10 for loss in after.values())
