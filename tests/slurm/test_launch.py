"""`srun megatron-ntp launch` on a real Slurm: what it reads there, and a rank that is killed."""

import sys

import pytest
from cluster import wait_for
from conftest import ROOT, Site
from ranks import free_port
from test_jobs import STAND_IN, tracker

# As docs/restart.md has it, but for the endpoint: both nodes of this cluster are one machine.
JOB = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10 --output=job-%j.out --open-mode=append
srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --no-kill \\
    {sys.executable} -m megatron_ntp launch --rdzv-endpoint 127.0.0.1:PORT --gpus-per-node 2 \\
    --tp 2 --faults faults.txt --backoff 0 --stop-grace 2 \\
    -- {sys.executable} train.py --ntp --exit-signal-handler --save checkpoints \\
    --load checkpoints --steps 40
"""


@pytest.mark.slow
def test_one_step_for_the_whole_job(site: Site) -> None:
    (site.folder / "train.py").write_text(STAND_IN)
    script = site.folder / "job.sbatch"
    script.write_text(JOB.replace("PORT", str(free_port())))
    job_id = site.cluster.submit(script, f"--export=ALL,PYTHONPATH={ROOT}")
    wait_for("progress", lambda: tracker(site) >= 3, 90)
    (site.folder / "faults.txt").write_text("n1 0 XID 79\n")
    (site.folder / "die-1").write_text("-9")
    ended = site.cluster.wait_for_end(job_id)
    output = site.output(job_id)
    assert ended["JobState"] == "COMPLETED" and ended["ExitCode"] == "0:0", output
    assert list(site.ranks(job_id, 1)) == ["00.n1", "01.n1", "02.n2", "03.n2"]
    second = site.ranks(job_id, 2)
    assert list(second) == ["00.n2", "01.n2", "02.n1"], output
    words = second["02.n1"].split()
    assert words[:6] == "world 3 failed 0:0 devices 1".split() and int(words[7]) >= 3
    assert all(text.endswith("done\n") for text in second.values())
    assert "n1 slot 0: XID 79" in output
