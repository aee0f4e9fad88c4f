"""Megatron's own loop on a real Slurm: a GPU is lost, the time limit comes, a new job goes on.

Two nodes of two GPUs train TP2 x DP2 on the CPU runtime. A rank is killed and its GPU reported: the
restart runs at degrees 2 and 1 from the newest checkpoint. Then the batch script gets the signal
that Slurm sends before a time limit: Megatron's own exit handler saves and ends the job well. A
second job goes on from there.
"""

import contextlib
import os
import re
import signal

import psutil
import pytest
from cluster import wait_for
from conftest import ROOT, Site

SAVE_EVERY = 50
TRAIN = f"""
    -m megatron_ntp run --cpu {ROOT / "scripts" / "pretrain_gpt.py"}
    --tensor-model-parallel-size 2 --num-layers 1 --hidden-size 16 --num-attention-heads 4
    --kv-channels 4 --ffn-hidden-size 24 --seq-length 8 --max-position-embeddings 8
    --vocab-size 30 --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 4
    --train-iters 1000000 --lr 1e-2 --min-lr 1e-2 --mock-data --tokenizer-type NullTokenizer
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0
    --eval-interval 1000000 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
    --exit-signal-handler --save checkpoints --load checkpoints --save-interval {SAVE_EVERY} --ntp
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


def tracked(site: Site) -> int:
    """The newest checkpoint's iteration, 0 before the first."""
    path = site.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text() or 0) if path.exists() else 0


def wait_for_checkpoint(site: Site, job_id: str, after: int) -> None:
    def is_there() -> bool:
        state = site.cluster.job(job_id)["JobState"]
        assert state in ("PENDING", "CONFIGURING", "RUNNING"), site.output(job_id)
        return tracked(site) > after

    wait_for(f"a checkpoint after iteration {after}", is_there, 300)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_lost_gpu_then_the_time_limit_then_a_new_job(site: Site) -> None:
    train = " ".join(TRAIN.split())
    job_id = site.submit(train)
    wait_for_checkpoint(site, job_id, 0)
    (site.folder / "faults.txt").write_text("n1 1 XID 79\n")
    os.kill(rank_process(str(site.folder), 1).pid, signal.SIGKILL)
    wait_for("the second attempt", lambda: site.ranks(job_id, 2), 120)
    reached = tracked(site)
    wait_for_checkpoint(site, job_id, reached)
    site.cluster.call("scancel", "--batch", "--signal=USR1", job_id)  # as #SBATCH --signal=B:USR1
    ended = site.cluster.wait_for_end(job_id, 120)
    output = site.output(job_id)
    assert ended["JobState"] == "COMPLETED" and ended["ExitCode"] == "0:0", output
    assert re.search(r"attempt 1 ended with status [1-9]", output), "peers may end before it"
    assert "the time limit is near" in output and "attempt 2 ended with status 0" in output
    check_restart(site.ranks(job_id, 1), site.ranks(job_id, 2))
    check_exit_handler(site.ranks(job_id, 2), tracked(site))

    saved = tracked(site)
    job_id = site.submit(f"{train} --exit-interval 10")
    assert site.cluster.wait_for_end(job_id, 300)["ExitCode"] == "0:0", site.output(job_id)
    after = steps(site.ranks(job_id, 1)["02.n1"])
    assert min(after) == saved + 1, "it went on from the last step of the job before"
    assert max(after) % 10 == 0 and max(after) - saved <= 10


def check_restart(first: dict[str, str], second: dict[str, str]) -> None:
    assert list(second) == ["00.n2", "01.n2", "02.n1"]
    before, after = steps(first["03.n2"]), steps(second["02.n1"])
    assert SAVE_EVERY <= min(after) - 1 <= max(before)
    assert (min(after) - 1) % SAVE_EVERY == 0, "it went on from a checkpoint"
    assert "ntp_failed" in second["00.n2"] and "0:1" in second["00.n2"]
    assert all(0 < loss < 10 for loss in after.values())


def check_exit_handler(ranks: dict[str, str], saved: int) -> None:
    """Every rank finished the same step, which was saved although no interval was over."""
    assert max(steps(ranks["02.n1"])) == saved and saved % SAVE_EVERY
    assert re.search(f"successfully saved checkpoint from iteration +{saved} ", ranks["00.n2"])
    assert "exiting program after receiving SIGTERM" in ranks["00.n2"]
