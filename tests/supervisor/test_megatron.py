"""Megatron's own loop under a supervisor: a GPU fails, the job goes on with what is left.

TP2 x DP2 on the CPU runtime. A rank is killed and its GPU reported; within the one command the job
comes back at degrees 2 and 1 from the newest checkpoint, and ends where plain Megatron ends.
"""

import os
import signal
from pathlib import Path

import pytest
from ranks import SCRIPT, run_training
from supervised import TRACKER, Job, Supervisor, wait_for

from megatron_ntp.rehearsal.parity import compare, read_losses

LAST = 12
FLAGS = f"""
    --tensor-model-parallel-size 2 --num-layers 1 --hidden-size 16 --num-attention-heads 4
    --kv-channels 4 --ffn-hidden-size 24 --seq-length 8 --max-position-embeddings 8
    --vocab-size 30 --make-vocab-size-divisible-by 16 --micro-batch-size 1 --global-batch-size 4
    --train-iters {LAST} --lr 1e-2 --min-lr 1e-2 --mock-data --tokenizer-type NullTokenizer
    --attention-dropout 0 --hidden-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
    --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable
"""
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONWARNINGS": "ignore",
    "SLURMD_NODENAME": "n1",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_comes_back_at_the_reduced_degree(tmp_path: Path) -> None:
    train = f"-m megatron_ntp run --cpu --loss-log losses.jsonl {SCRIPT} {' '.join(FLAGS.split())}"
    train += " --save ckpt --load ckpt --save-interval 3 --ntp"
    words = "--gpus-per-node 4 --job-id job --faults faults.txt --stop-grace 2"
    supervisor = Supervisor(tmp_path, words, train, ENVIRON)
    job = Job(tmp_path)
    try:
        tracker = tmp_path / "ckpt" / TRACKER
        wait_for("the first checkpoint", tracker.exists, 250)
        (tmp_path / "faults.txt").write_text("n1 1 XID 79\n")
        os.kill(job.pid(1), signal.SIGKILL)
        assert supervisor.wait(250) == 0, supervisor.output
    finally:
        supervisor.kill()
    first, second = job.events("attempt-started")
    assert (first["degrees"], second["degrees"]) == ([2, 2], [1, 2])
    ended = job.events("attempt-ended")[0]
    assert second["checkpoint"] == ended["checkpoint"] >= 3
    assert 0 <= ended["steps_lost"] == ended["step"] - ended["checkpoint"] <= 3
    resumed = job.events("first-step")[1]
    assert resumed["step"] > second["checkpoint"]
    parts = [resumed[name] for name in ("start_s", "load_s", "first_step_s")]
    assert all(part > 0 for part in parts)
    told = sum(parts) + ended["stop_s"] + second["health_s"] + second["planning_s"]
    assert told - 0.1 < resumed["restart_s"] < told + 10, "the parts make up the whole"
    plain = run_training([*FLAGS.split()], 4).losses
    plain[2] = 2 * plain[2] - plain[1]  # Megatron's second line is the mean of two steps
    parity = compare(plain, read_losses(tmp_path / "losses.jsonl"), LAST)
    assert parity.holds, parity.steps
    assert not job.processes()
