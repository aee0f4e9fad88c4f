"""`megatron-ntp rehearse` itself, short: real ranks, real checkpoints, a real SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine is slow to import

SHORT = "--degrees 2,1 --heads 4 --steps 9 --save-interval 3 --fail-at 5 --microbatches 2".split()
COMMAND = [sys.executable, "-m", "megatron_ntp", "rehearse", *SHORT]
TIMEOUT_S = 240.0
POLL_S = 0.02

# A run of the command in which matplotlib cannot be imported, and the reduced job clips its
# gradients elsewhere than the other jobs.
TAMPERED = """
import sys
sys.modules["matplotlib"] = None
from megatron_ntp.rehearsal import story
saves = story.Story._loads
story.Story._loads = lambda self: (*saves(self), "--clip-grad", "0.1")
from megatron_ntp import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def _run(command: list[str], output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, "--output", str(output), *more],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.fixture(scope="module")
def tampered(output: Path) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """How the run ended, and what it left."""
    command = [sys.executable, "-c", TAMPERED, "rehearse", *SHORT]
    done = _run(command, output)
    return done, {path.name for path in output.iterdir()}


@pytest.fixture(scope="module")
def passed(
    output: Path, tampered: tuple[subprocess.CompletedProcess[str], set[str]]
) -> subprocess.CompletedProcess[str]:
    """A second rehearsal, on top of the first."""
    (output / "other.txt").write_text("not the rehearsal's")
    return _run(COMMAND, output, "--policy", "shrink")


def test_broken_parity_is_status_1(
    tampered: tuple[subprocess.CompletedProcess[str], set[str]],
) -> None:
    done, _ = tampered
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: largest relative difference" in done.stdout


def test_without_matplotlib_only_the_picture_is_missing(
    tampered: tuple[subprocess.CompletedProcess[str], set[str]],
) -> None:
    done, left = tampered
    assert "no picture: matplotlib is not installed" in done.stdout
    assert left == {"rehearsal.json", "rehearsal"}


def test_a_rehearsal_passes(passed: subprocess.CompletedProcess[str], output: Path) -> None:
    assert passed.returncode == 0, passed.stdout + passed.stderr
    result = json.loads((output / "rehearsal.json").read_text())
    assert result["passed"] is True
    assert result["max_loss_rel_diff"] <= 1e-5
    assert result["steps"] == 9
    assert result["degrees"] == [2, 1]
    assert result["reshard_bytes"] == result["reshard_bytes_minimum"] > 0
    assert len(result["optimizer_state_bytes"]) == 3
    extra = [rank["is_extra"] for rank in result["ranks"]]
    assert extra == [False, True, False]
    assert [nbytes == 0 for nbytes in result["optimizer_state_bytes"]] == extra
    phases = {"imports", "healthy", "reduced", "repaired", "undisturbed", "total"}
    assert set(result["seconds"]) == phases
    assert result["killed_ranks"] == [3]
    assert result["killed_in_step"] >= 5
    assert "4" in result["lost_losses"]
    assert [step["step"] for step in result["losses"]] == list(range(1, 10))


def test_it_leaves_its_files_and_no_others(
    passed: subprocess.CompletedProcess[str], output: Path
) -> None:
    names = {path.name for path in output.iterdir()}
    assert names == {"rehearsal.json", "rehearsal.png", "rehearsal", "other.txt"}
    assert (output / "rehearsal.png").read_bytes().startswith(b"\x89PNG")
    plan = json.loads((output / "rehearsal" / "plan.json").read_text())
    assert plan["topology"]["failed"] == [[1, 1]]
    assert (output / "rehearsal" / "checkpoints" / "iter_0000006").is_dir()


def test_it_tells_the_story(passed: subprocess.CompletedProcess[str]) -> None:
    text = passed.stdout
    in_order = [
        "1/4 healthy",
        "SIGKILL to rank 3 (replica:slot 1:1)",
        "NTP plan, version 1",
        "2/4 reduced",
        "TP2 + TP1, 3 processes, --ntp",
        "3/4 repaired",
        "4/4 undisturbed",
        "uniform loss",
        "Ranks of the reduced job",
        "exactly the minimum",
        "PASSED",
    ]
    places = [text.find(words) for words in in_order]
    assert -1 not in places and places == sorted(places), text


# Accidents


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [*COMMAND, "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process, tmp_path / "rehearsal"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(POLL_S)


def _gone(processes: list[psutil.Process]) -> bool:
    """Whether all have ended. An orphan may stay a zombie for as long as init likes."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in alive)


def _in_phase(phase: str, work: Path, process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Every process of the rehearsal, once this phase has done a step."""
    losses = work / "losses" / f"{phase}.jsonl"
    _wait_for(lambda: losses.exists() and losses.stat().st_size > 0, process)
    return psutil.Process(process.pid).children(recursive=True)


def test_a_rank_that_dies_unexpectedly_is_status_3(
    started: tuple[subprocess.Popen[str], Path],
) -> None:
    process, work = started
    everything = _in_phase("healthy", work, process)
    ranks = [p for p in everything if p.ppid() == process.pid and _rank(p) is not None]
    assert len(ranks) == 4
    victim = next(p for p in ranks if _rank(p) == 0)
    victim.kill()
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, error
    assert "rank 0 of 4 failed (killed by SIGKILL)" in error
    assert "rank-00.log" in error
    assert _gone(everything)
    assert not (work.parent / "rehearsal.json").exists()


def _rank(process: psutil.Process) -> int | None:
    """By its log: /proc shows a fork's parent's environment."""
    for file in process.open_files():
        if Path(file.path).name.startswith("rank-"):
            return int(Path(file.path).stem.removeprefix("rank-"))
    return None


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_rehearsal_that_is_stopped_leaves_no_process(
    started: tuple[subprocess.Popen[str], Path], signal_name: str
) -> None:
    process, work = started
    everything = _in_phase("healthy", work, process)
    assert len(everything) >= 5
    process.send_signal(signal.Signals[signal_name])
    _, error = process.communicate(timeout=30)
    if signal_name == "SIGINT":
        assert process.returncode == 130
        assert "interrupted" in error
    assert _gone(everything)
