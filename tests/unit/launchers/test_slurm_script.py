"""The script that `megatron-ntp slurm` writes: options, quoting, and the shipped example."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_ntp.errors import PlanTopologyError, UnsupportedFlagError
from megatron_ntp.launchers import slurm

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ROOT / "scripts" / "slurm" / "pretrain_ntp.sbatch"


def write(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert slurm.slurm(words) == 0
    text = capsys.readouterr().out
    assert "{{" not in text.replace("${", ""), "a placeholder is left"
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return text


def test_the_shipped_example_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"megatron-ntp slurm {slurm.EXAMPLE} > {SHIPPED.relative_to(ROOT)}"
    assert write(capsys, *slurm.EXAMPLE.split()) == SHIPPED.read_text(), f"run: {command}"


def test_options_of_the_site(capsys: pytest.CaptureFixture[str]) -> None:
    text = write(
        capsys,
        *"--nodes 36 --gpus-per-node 4 --tp 72 --gres --segment 18 --partition gb200".split(),
        *"--account lab --no-requeue --signal-before 900 --sbatch constraint=ib".split(),
        *("--container", "--container-image=x.sqsh --container-mounts=/data", "--health", "a 'b'"),
        *"--requeue-at-limit --replicas 2 --pp 1 --job-name big".split(),
        *"-- pretrain_gpt.py --ntp --data-path".split(),
        "a b",
    )
    header = [line[8:] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--nodes=36",
        "--gres=gpu:4",
        "--segment=18",
        "--partition=gb200",
        "--account=lab",
        "--no-requeue",
        "--signal=B:USR1@900",
        "--constraint=ib",
        "--job-name=big",
    } <= set(header)
    assert "CONTAINER=(--container-image=x.sqsh --container-mounts=/data)" in text
    assert "TP=72 PP=1 CP=1 GPUS_PER_NODE=4 REPLICAS=2" in text
    assert "REQUEUE_AT_LIMIT=1" in text
    assert "    python pretrain_gpt.py\n    --ntp\n    --data-path 'a b'\n" in text
    assert re.search(r"^HEALTH='a .*b.*'$", text, re.MULTILINE)


def test_heterogeneous_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = write(capsys, *"--het 15:8 --het 1:7 --gpus-per-node 8 --tp 8".split())
    first, second = text.split("#SBATCH hetjob\n")
    assert "#SBATCH --nodes=15\n#SBATCH --gpus-per-node=8\n" in first
    assert second.startswith("#SBATCH --nodes=1\n#SBATCH --gpus-per-node=7\n")
    assert "SLURM_JOB_NODELIST_HET_GROUP_1" in text and "--het-group=0,1 " in text


def test_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my job.sbatch"
    assert slurm.slurm([*slurm.EXAMPLE.split(), "--script", str(path)]) == 0
    assert path.read_text() == SHIPPED.read_text()
    assert f"sbatch '{path}'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "--gpus-per-node 8 --tp 8",
        "--nodes 2 --tp 8",
        "--nodes 2 --het 1:8 --gpus-per-node 8 --tp 8",
        "--het 1 --gpus-per-node 8 --tp 8",
        "--nodes 2 --gpus-per-node 8 --tp 8 --time 10",
    ],
)
def test_wrong_usage(words: str) -> None:
    with pytest.raises(SystemExit):
        slurm.slurm(words.split())


def test_a_command_that_every_restart_would_rewind_is_refused() -> None:
    words = "--nodes 2 --gpus-per-node 8 --tp 8 -- p.py --save a --load a --ckpt-step=5".split()
    with pytest.raises(UnsupportedFlagError, match="remove --ckpt-step"):
        slurm.slurm(words)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("12:00:01", 43201),
        ("1-0", 86400),
        ("1-2:03", 93780),
        ("1-2:03:04", 93784),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_slurm_times(text: str, seconds: int | None) -> None:
    assert slurm.time_limit_s(text) == seconds


def test_a_shape_that_cannot_be_is_refused_before_the_queue() -> None:
    with pytest.raises(PlanTopologyError, match="one must divide the other"):
        slurm.slurm("--nodes 2 --gpus-per-node 8 --tp 6".split())


def test_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "-s", "bash", SHIPPED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
