"""One cluster for all tests of this level, and a folder with a job script for each."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cluster import Cluster, munge, why_not

from megatron_ntp.launchers import slurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    found = Cluster(folder)
    try:
        with munge():
            try:
                found.start()
                yield found
            finally:
                found.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Site:
    """A folder shared by the nodes, with what a user has there."""

    cluster: Cluster
    folder: Path

    def submit(self, training: str, options: str = "", *sbatch: str) -> str:
        """Writes the script with `megatron-ntp slurm` and submits it."""
        script = self.folder / "job.sbatch"
        command = f"{sys.executable} -m megatron_ntp"
        shape = options if "--het" in options else f"--nodes 2 {options}"
        words = f"{shape} --gpus-per-node 2 --tp 2 --master-addr 127.0.0.1 --backoff 0"
        words += " --time 10" + ("" if "--signal-before" in options else " --signal-before 60")
        fixed = ["--megatron-ntp", command, "--faults", "faults.txt", "--script", str(script)]
        assert slurm.slurm([*words.split(), *fixed, "--", *training.split()]) == 0
        return self.cluster.submit(script, f"--export=ALL,PYTHONPATH={ROOT}", *sbatch)

    def run(self, job_id: str) -> Path:
        return self.folder / "ntp-runs" / job_id

    def output(self, job_id: str) -> str:
        return "".join(path.read_text() for path in self.folder.glob(f"*-{job_id}.out"))

    def ranks(self, job_id: str, attempt: int) -> dict[str, str]:
        """Output of the ranks of an attempt, by `RANK.HOST`."""
        folder = self.run(job_id) / f"attempt-{attempt:03d}"
        return {
            path.name.removeprefix("rank-000").removesuffix(".log"): path.read_text()
            for path in sorted(folder.glob("rank-*"))
        }


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Site]:
    """Prints afterwards what jobs said: pytest shows it where a test fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="job-", dir=cluster.folder))
    yield Site(cluster, folder)
    print(cluster.call("squeue", check=False))
    cluster.call("scancel", "--user=root", check=False)
    for path in sorted([*folder.glob("*.out"), *folder.glob("ntp-runs/*/*/rank-*")]):
        print(f"--- {path.name}\n{path.read_text()[-3000:]}")
    for path in sorted(cluster.folder.glob("*.log")):
        print(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-15:]))
