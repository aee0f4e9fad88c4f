"""The batch script on a real Slurm, with a stand-in for the training that costs no torch.

The stand-in counts steps into the checkpoint's tracker file, so that a restart shows where it went
on; what each test needs of it is switched on by files in the job's folder.
"""

from pathlib import Path

import pytest
from cluster import wait_for
from conftest import Site

STAND_IN = """
import os, pathlib, signal, sys, time
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
failed = sys.argv[sys.argv.index("--ntp-failed") + 1] if "--ntp-failed" in sys.argv else "none"
folder = pathlib.Path("checkpoints")
folder.mkdir(exist_ok=True)
tracker = folder / "latest_checkpointed_iteration.txt"
first = int(tracker.read_text()) if tracker.exists() else 0
print("world", world, "failed", failed, "devices", os.environ["CUDA_VISIBLE_DEVICES"],
      "from", first, flush=True)
barrier = "in-" + os.environ["MASTER_PORT"] + "-"
pathlib.Path(barrier + str(rank)).touch()
while len(list(pathlib.Path().glob(barrier + "*"))) < world:
    time.sleep(0.1)
stop = False
def on_term(number, frame):
    global stop
    stop = True
if "--exit-signal-handler" in sys.argv:
    signal.signal(signal.SIGTERM, on_term)
last = int(sys.argv[sys.argv.index("--steps") + 1])
for step in range(first + 1, last + 1):
    time.sleep(0.2)
    die = pathlib.Path(f"die-{rank}")
    if die.exists():
        status = int(die.read_text())
        if status == 93 or not pathlib.Path("keep").exists():
            die.unlink()
        os.kill(os.getpid(), signal.SIGKILL) if status < 0 else sys.exit(status)
    if rank == 0:
        part = folder / "part"
        part.write_text(str(step))
        part.replace(tracker)
    if stop:
        print("saved and stopped at", step, flush=True)
        sys.exit(0)
print("done", flush=True)
"""


@pytest.fixture
def job(site: Site) -> Site:
    (site.folder / "train.py").write_text(STAND_IN)
    return site


def train(steps: int) -> str:
    return f"train.py --ntp --exit-signal-handler --steps {steps}"


def tracker(site: Site) -> int:
    path = site.folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


@pytest.mark.slow
def test_a_killed_rank_comes_back_at_the_reduced_degree(job: Site) -> None:
    job_id = job.submit(train(40))
    wait_for("progress", lambda: tracker(job) >= 3, 90)
    (job.folder / "faults.txt").write_text("n1 0 XID 79\n")
    (job.folder / "die-1").write_text("-9")
    ended = job.cluster.wait_for_end(job_id)
    output = job.output(job_id)
    assert ended["JobState"] == "COMPLETED" and ended["ExitCode"] == "0:0", output
    first = job.ranks(job_id, 1)
    assert list(first) == ["00.n1", "01.n1", "02.n2", "03.n2"]
    assert all(
        text.startswith("world 4 failed none devices 0,1 from 0\n") for text in first.values()
    )
    second = job.ranks(job_id, 2)
    assert list(second) == ["00.n2", "01.n2", "02.n1"]
    words = second["02.n1"].split()
    assert words[:6] == "world 3 failed 0:0 devices 1".split() and int(words[7]) >= 3
    assert "world 3 failed 0:0 devices 0,1" in second["00.n2"]
    assert all(text.endswith("done\n") for text in second.values())
    assert "without n1 slot 0: XID 79" in output
    assert "attempt 1 ended with status 137" in output and "ended by signal 9" in output
    assert "attempt 2 ended with status 0" in output


@pytest.mark.slow
def test_93_is_final_and_so_is_no_progress(job: Site) -> None:
    (job.folder / "die-2").write_text("93")
    job_id = job.submit(train(400))
    ended = job.cluster.wait_for_end(job_id)
    assert ended["ExitCode"] == "93:0", job.output(job_id)
    assert "a restart would not help" in job.output(job_id)
    assert not (job.run(job_id) / "attempt-002").exists()
    (job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    (job.folder / "keep").touch()
    (job.folder / "die-0").write_text("1")
    job_id = job.submit(train(400))
    ended = job.cluster.wait_for_end(job_id)
    assert ended["ExitCode"] == "93:0", job.output(job_id)
    assert "2 attempts in a row made no checkpoint" in job.output(job_id)


@pytest.mark.slow
def test_time_limit_saves_and_queues_again(job: Site) -> None:
    """Slurm's own signal before its own limit; the second allocation is the third attempt's."""
    job_id = job.submit(train(100_000), "--requeue-at-limit --signal-before 60", "--time=2")
    wait_for("progress", lambda: tracker(job) >= 3, 90)
    wait_for("the requeued attempt", lambda: job.ranks(job_id, 2), 300)
    wait_for("its ranks", lambda: all(job.ranks(job_id, 2).values()), 100)
    output = job.output(job_id)
    assert "the time limit is near" in output and "queueing again" in output
    assert all("saved and stopped at" in text for text in job.ranks(job_id, 1).values())
    assert "restart 1: attempt 2" in output
    saved = int(job.ranks(job_id, 1)["00.n1"].split()[-1])
    assert f"from {saved}\n" in job.ranks(job_id, 2)["00.n1"]
    assert job.cluster.job(job_id)["Restarts"] == "1"
    job.cluster.call("scancel", job_id)
    ended = job.cluster.wait_for_end(job_id)
    assert ended["JobState"] == "CANCELLED"
    wait_for("idle nodes", job.cluster._is_idle, 60)
    assert not list(_processes(job.folder)), "scancel left processes behind"


def _processes(folder: Path) -> list[str]:
    """Command lines of processes whose working folder is the job's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").resolve() == folder.resolve():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_state_of_an_old_job_with_the_same_id_is_put_aside(job: Site) -> None:
    next_id = int(job.cluster.submit(_sleeper(job.folder), "--hold")) + 1
    job.cluster.call("scancel", str(next_id - 1))
    for attempt in range(1, 30):
        (job.run(str(next_id)) / f"attempt-{attempt:03d}").mkdir(parents=True)
    job_id = job.submit(train(3))
    assert job_id == str(next_id)
    ended = job.cluster.wait_for_end(job_id)
    assert ended["ExitCode"] == "0:0", job.output(job_id)
    assert [path.name for path in job.run(job_id).iterdir()] == ["attempt-001"]
    assert len(list(job.folder.glob(f"ntp-runs/{job_id}.stale-*"))) == 1


def _sleeper(folder: Path) -> Path:
    path = folder / "sleep.sbatch"
    path.write_text("#!/bin/bash\nsleep 1\n")
    return path


@pytest.mark.slow
def test_heterogeneous_job_with_a_node_of_fewer_gpus(job: Site) -> None:
    job_id = job.submit(train(3), "--het 1:2 --het 1:1")
    ended = job.cluster.wait_for_end(job_id)
    output = job.output(job_id)
    assert ended["ExitCode"] == "0:0", output
    assert "not visible: 1 of 2 GPUs are" in output
    ranks = job.ranks(job_id, 1)
    assert len(ranks) == 3
    assert all("world 3 failed 1:1" in text for text in ranks.values()), ranks


@pytest.mark.slow
def test_a_shape_that_cannot_run_is_not_tried_again(job: Site) -> None:
    (job.folder / "faults.txt").write_text("n2 * broken switch\n")
    job_id = job.submit(train(3))
    ended = job.cluster.wait_for_end(job_id)
    assert ended["ExitCode"] == "93:0"
    assert "Drop the replica" in job.output(job_id)
    job_id = job.submit(train(3), "--replicas 1")
    assert job.cluster.wait_for_end(job_id)["ExitCode"] == "0:0", job.output(job_id)
    assert "spare: n2" in job.output(job_id)
    assert list(job.ranks(job_id, 1)) == ["00.n1", "01.n1"]
