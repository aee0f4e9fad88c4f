"""Two supervisors on loopback as two nodes, with 4 and 3 GPUs of the imagined NVML."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_nvml import FakeNode
from ranks import free_port
from supervised import Job, Supervisor, wait_for

if shutil.which("gcc") is None:
    pytest.skip("needs gcc, to build libnvidia-ml.so.1", allow_module_level=True)

TRAIN = "-m train --ntp --save ckpt --load ckpt --exit-signal-handler"


@pytest.fixture
def nodes(tmp_path: Path) -> list[FakeNode]:
    found = []
    for rank, num_gpus in enumerate((4, 3)):
        folder = tmp_path / f"gpus-{rank}"
        folder.mkdir()
        found.append(FakeNode.create(folder, num_gpus))
        for index in range(num_gpus):
            found[-1].gpu(
                index
            )._uuid = f"GPU-{rank}000000{index}-aaaa-bbbb-cccc-{index:012x}".encode()
    return found


@pytest.fixture
def start(tmp_path: Path, nodes: list[FakeNode]) -> Iterator[Callable[[int], Supervisor]]:
    """Starts the supervisor of a node."""
    endpoint = f"127.0.0.1:{free_port()}"
    found: list[Supervisor] = []

    def start(rank: int) -> Supervisor:
        words = (
            f"--nnodes 2 --node-rank {rank} --rdzv-endpoint {endpoint} --gpus-per-node 4 --tp 4 "
            "--job-id job --stop-grace 2 --health-interval 0.5 --node-deadline 4 --backoff 0.2 "
            "--hang-step 30 --min-degree 3"
        )
        environ = nodes[rank].env(SLURMD_NODENAME=f"n{rank + 1}")
        found.append(Supervisor(tmp_path, words, f"{TRAIN} --steps 100000", environ))
        return found[-1]

    yield start
    for supervisor in found:
        if supervisor.process.poll() is None:
            supervisor.kill()


def devices(job: Job, attempt: int) -> dict[str, str]:
    """Device by rank and host."""
    ranks = wait_for("the ranks' output", lambda: job.ranks(attempt))
    return {name: text.split()[5] for name, text in ranks.items()}


@pytest.mark.slow
def test_two_nodes_with_four_and_three_gpus(
    tmp_path: Path, nodes: list[FakeNode], start: Callable[[int], Supervisor]
) -> None:
    job, supervisors = Job(tmp_path), [start(0), start(1)]
    job.wait_for("first-step", 1)
    assert job.events("attempt-started")[0]["degrees"] == [4, 3]
    first, second = nodes[0].uuids, nodes[1].uuids
    expected = {f"{rank:02d}.n1": first[rank] for rank in range(4)}
    expected |= {f"{rank + 4:02d}.n2": second[rank] for rank in range(3)}
    assert devices(job, 1) == expected
    assert all("of 7" in text and "failed 1:3" in text for text in job.ranks(1).values())

    nodes[0].gpu(2).lost = 1
    fault = job.wait_for("fault-detected", 1)
    assert first[2] in fault["reason"] and fault["reason"].startswith("n1: ")
    job.wait_for("first-step", 2)
    assert job.events("attempt-started")[1]["degrees"] == [3, 3]
    kept = [uuid for uuid in first if uuid != first[2]]
    assert [devices(job, 2)[f"{rank:02d}.n1"] for rank in range(3)] == kept
    dead = job.events("health")[1]["dead"]
    assert set(dead) == {"n1 slot 2", "n2 slot 3"}, dead

    supervisors[1].kill()
    lost = job.wait_for("fault-detected", 2)
    assert "rank" in lost["reason"] or "node n2 is lost" in lost["reason"], lost
    job.wait_for("first-step", 3)
    assert job.events("attempt-started")[2]["degrees"] == [3]
    assert job.events("decision")[2]["dropped"] == 1
    assert list(job.ranks(3)) == ["00.n1", "01.n1", "02.n1"]
    assert all("failed 0:2" in text for text in job.ranks(3).values())

    nodes[0].gpu(1).lost = 1
    job.wait_for("attempt-ended", 3)
    wait_for("patience", lambda: "waiting 300 s for lost nodes: n2" in supervisors[0].output)
    start(1)
    job.wait_for("first-step", 4)
    assert list(job.ranks(4)) == ["00.n2", "01.n2", "02.n2"], "node 0 itself has too few"

    supervisors[0].send(signal.SIGTERM)
    assert supervisors[0].wait() == 0, supervisors[0].output
    assert not job.processes()
