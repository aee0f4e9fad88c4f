"""The parts of `megatron-ntp rehearse` that need no ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ntp import cli
from megatron_ntp.errors import NTPError
from megatron_ntp.rehearsal import folder, processes
from megatron_ntp.rehearsal.job import Options, RehearsalError, megatron_flags, training_script
from megatron_ntp.rehearsal.parity import compare, read_losses
from megatron_ntp.rehearsal.progress import Progress
from megatron_ntp.rehearsal.report import verdict

UNIFORM = {1: 4.0, 2: 3.0, 3: 2.0}


# Parity


def test_parity_holds_within_the_tolerance() -> None:
    parity = compare(UNIFORM, {**UNIFORM, 2: 3.0 * (1 + 9e-6)}, 3)
    assert parity.holds
    assert parity.max_rel_diff == pytest.approx(9e-6)
    assert parity.worst is not None and parity.worst.step == 2
    assert verdict(parity).startswith("PASSED")


@pytest.mark.parametrize(
    "ntp",
    [
        {**UNIFORM, 2: 3.0 * (1 + 1.1e-5)},
        {**UNIFORM, 3: 2.0 * (1 - 1.1e-5)},
        {**UNIFORM, 2: math.nan},
        {**UNIFORM, 2: math.inf},
        {1: 4.0, 3: 2.0},
        {**UNIFORM, 4: 1.0},
        {},
    ],
    ids=["above", "below", "nan", "inf", "step missing", "step too many", "empty"],
)
def test_parity_is_broken(ntp: dict[int, float]) -> None:
    parity = compare(UNIFORM, ntp, 3)
    assert not parity.holds
    assert verdict(parity).startswith("FAILED")


def test_a_loss_that_is_nan_in_both_jobs_is_no_parity() -> None:
    assert not compare({1: math.nan}, {1: math.nan}, 1).holds


def _line(step: int, loss: float, skipped: bool = False) -> str:
    losses = {} if skipped else {"lm loss": loss}
    return json.dumps({"step": step, "losses": losses, "skipped": skipped}) + "\n"


def test_losses_are_read_from_a_file_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    assert read_losses(path) == {}
    path.write_text(_line(1, 4.284681797027588) + _line(2, 3.0) + '{"step": 3, "lo')
    assert read_losses(path) == {1: 4.284681797027588, 2: 3.0}


def test_a_skipped_step_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    path.write_text(_line(1, 4.0) + _line(2, 0.0, skipped=True))
    with pytest.raises(NTPError, match="step 2 was skipped"):
        read_losses(path)


# Options


def test_the_story_of_the_default_options() -> None:
    options = Options()
    assert options.nominal_tp == 4
    assert (options.resumed_after, options.fail_at, options.repaired_after) == (8, 12, 16)
    assert options.killed_ranks() == (7,)
    assert options.topology.world_size == 7
    assert "--swiglu" in megatron_flags(options)
    assert training_script().is_file()


@pytest.mark.parametrize(
    ("degrees", "failed", "killed"),
    [
        ((4, 3), ((1, 0),), (4,)),
        ((3, 4), None, (3,)),
        ((4, 2, 3), ((1, 1), (1, 2), (2, 3)), (5, 6, 11)),
    ],
)
def test_the_ranks_on_the_failed_slots_are_killed(
    degrees: tuple[int, ...], failed: tuple[tuple[int, int], ...] | None, killed: tuple[int, ...]
) -> None:
    assert Options(degrees=degrees, failed=failed).killed_ranks() == killed


def test_failure_late_in_a_job_goes_back_to_the_latest_checkpoint() -> None:
    options = Options(num_steps=30, save_interval=5, fail_at=16)
    assert (options.resumed_after, options.repaired_after) == (15, 20)
    assert replace(options, fail_at=15).resumed_after == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--degrees 4,4", "no failure to rehearse"),
        ("--degrees 4,x", "item 1 is 'x'"),
        ("--degrees 4,3 --failed 0:1", "disagree with failed slots"),
        ("--heads 6", "multiple of the healthy TP degree 4"),
        ("--fail-at 8", "would leave no checkpoint"),
        ("--fail-at 25", "too few"),
        ("--steps 2", "too few"),
        ("--save-interval 0", "at least 1"),
        ("--microbatches 0", "num_microbatches"),
        ("--tolerance nan", "--tolerance"),
    ],
)
def test_bad_options_are_status_2(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rehearse", *words.split(), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("megatron-ntp rehearse: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_undisturbed_job_has_the_batch_of_the_reduced_one() -> None:
    """Under shrink only, and then no learning rate may depend on samples."""
    kept, shrunk = (Options(batch_policy=policy) for policy in ("keep", "shrink"))
    assert kept.reduced_batch == kept.global_batch == 8
    assert shrunk.reduced_batch < shrunk.global_batch == 8
    assert "cosine" in megatron_flags(kept)
    assert "constant" in megatron_flags(shrunk)


# Output folder


def test_only_own_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with folder.claimed(tmp_path) as outputs:
        (outputs.work / "checkpoints").mkdir()
        (outputs.work / "plan.json").write_text("{}")
        outputs.results.write_text("{}")
        outputs.picture.write_text("")
    with folder.claimed(tmp_path) as outputs:
        assert not (outputs.work / "checkpoints").exists()
        assert not (outputs.work / "plan.json").exists()
        assert not outputs.results.exists() and not outputs.picture.exists()
    assert (tmp_path / "other.json").read_text() == "{}"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    work = tmp_path / "rehearsal"
    work.mkdir()
    (work / "thesis.tex").write_text("")
    with pytest.raises(RehearsalError, match="not made by a rehearsal"), folder.claimed(tmp_path):
        pass
    assert (work / "thesis.tex").exists()


def test_two_rehearsals_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        folder.claimed(tmp_path),
        pytest.raises(RehearsalError, match="another rehearsal"),
        folder.claimed(tmp_path),
    ):
        pass


# Progress


def test_plain_progress_is_a_few_lines() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.begin("1/4 healthy", "TP4 x DP2", 1, 24)
    for step in range(25):
        progress.step(step)
        progress.tick()
    progress.end()
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text
    assert text.count("\n") == 4
    assert "1/4 healthy  TP4 x DP2, steps 1 to 24" in text
    assert "step 16 of 24" in text


def test_live_progress_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    stream = io.StringIO()
    progress = Progress(stream, live=True)
    progress.begin("2/4 reduced", "TP4 + TP3, a detail that a narrow terminal cuts off", 9, 16)
    progress.step(12)
    frames = stream.getvalue().split("\r\x1b[K")
    assert all(len(frame) < 70 for frame in frames)
    assert "[############............] step 12/16" in frames[-1]
    assert "\n" not in stream.getvalue()
    progress.end()
    assert stream.getvalue().endswith(" s)\n")


# Processes


def _starter(program: str) -> processes.Starter:
    """Ranks that run a program of their own in place of a training script."""

    def start(words: Sequence[str], environment: dict[str, str], log: Path) -> int:
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                preexec_fn=functools.partial(processes.own_group, os.getpid()),
            )
        process.returncode = 0
        return process.pid

    return start  # type: ignore[return-value]


def test_a_failed_rank_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': print('out of paper'); sys.exit(7)\n"
        "time.sleep(60)"
    )
    with (
        pytest.raises(processes.RankFailedError) as failed,
        processes.Job([], 3, tmp_path, _starter(program)) as job,
    ):
        while job.running:
            job.check()
    assert "rank 1 of 3 failed (exit status 7)" in str(failed.value)
    assert "  | out of paper" in str(failed.value)
    assert set(job.statuses) == {0, 1, 2}


def test_a_killed_rank_is_not_mistaken_for_its_victims(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '2': time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(1)"
    )
    with processes.Job([], 3, tmp_path, _starter(program)) as job:
        while job.running:
            job.poll()
        with pytest.raises(processes.RankFailedError, match=r"rank 2 of 3 .*SIGKILL.*ranks 0, 1"):
            job.check()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """The next descriptor is too large for select()."""
    num_files = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * num_files:
        pytest.skip(f"no process may open more than {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * num_files), hard))
    with contextlib.ExitStack() as files:
        for _ in range(num_files):
            files.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_job_starts_beside_many_open_files(tmp_path: Path) -> None:
    with processes.Job([], 1, tmp_path, _starter("print('here')")) as job:
        while job.running:
            job.check()
    assert job.statuses == {0: 0}


def test_what_a_rank_has_started_ends_with_the_job(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    with processes.Job([], 1, tmp_path, _starter(program)) as job:
        while not job.log(0).read_text().strip():
            job.check()
        grandchild = psutil.Process(int(job.log(0).read_text()))
    psutil.wait_procs([grandchild], timeout=5)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
