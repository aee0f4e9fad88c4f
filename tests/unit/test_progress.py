"""What moments of Megatron's loop become in a rank's record and in the job's log."""

from pathlib import Path

import pytest

from megatron_ntp import beats, events
from megatron_ntp.integration.progress import BeatListener, EventListener


@pytest.fixture
def listener(tmp_path: Path) -> BeatListener:
    return BeatListener(beats.BeatWriter(tmp_path, 0))


def seen(folder: Path) -> tuple[str, int]:
    beat = beats.read(folder)[0]
    return beat.phase, beat.iteration


def test_a_job_that_goes_on_from_a_checkpoint(listener: BeatListener, tmp_path: Path) -> None:
    told = [
        ("start", -1, ("start", -1)),
        ("setup", -1, ("setup", -1)),
        ("joined", -1, ("setup", -1)),
        ("load", -1, ("load", -1)),
        ("loaded", 8, ("train", 8)),
        ("step", 8, ("train", 8)),
        ("stepped", 9, ("train", 9)),
        ("save", 9, ("save", 9)),
        ("saved", 9, ("train", 9)),
        ("eval", 9, ("eval", 9)),
        ("evaluated", 9, ("train", 9)),
        ("step", 9, ("train", 9)),
        ("stepped", 10, ("train", 10)),
        ("trained", 10, ("done", 10)),
        ("eval", 10, ("eval", 10)),
        ("evaluated", 10, ("done", 10)),
        ("save", 10, ("save", 10)),
        ("saved", 10, ("done", 10)),
        ("exit", 10, ("done", 10)),
    ]
    for moment, iteration, expected in told:
        listener(moment, iteration)
        assert seen(tmp_path) == expected, moment


@pytest.mark.parametrize("moment", ["setup", "step"])
def test_a_loop_of_another_library(moment: str, listener: BeatListener, tmp_path: Path) -> None:
    """It is one until it calls Megatron's own loop, or Megatron's steps."""
    told = [
        ("start", -1, ("start", -1)),
        ("joined", -1, ("other", -1)),
        ("load", -1, ("load", -1)),
        ("loaded", 8, ("other", 8)),
        ("save", 8, ("save", 8)),
        ("saved", 8, ("other", 8)),
        (moment, 8, ("setup" if moment == "setup" else "train", 8)),
        ("stepped", 9, ("train", 9)),
        ("save", 9, ("save", 9)),
        ("saved", 9, ("train", 9)),
    ]
    for moment_, iteration, expected in told:
        listener(moment_, iteration)
        assert seen(tmp_path) == expected, moment_


def test_a_job_that_loads_nothing(listener: BeatListener, tmp_path: Path) -> None:
    listener("step", 0)
    assert seen(tmp_path) == ("train", 0)
    before = beats.read(tmp_path)[0].since
    listener("step", 0)
    assert beats.read(tmp_path)[0].since == before, "the end of a step is progress, not its start"


def test_rank_0_logs_its_first_step_and_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    listener = EventListener(events.EventLog(path))
    for moment, iteration in (
        ("start", -1), ("loaded", 8), ("step", 8), ("stepped", 9), ("stepped", 10), ("trained", 10),
    ):  # fmt: skip
        listener(moment, iteration)
    assert [(event["event"], event["iteration"]) for event in events.read(path)] == [
        ("stepping", 9),
        ("trained", 10),
    ]


def test_a_log_that_cannot_be_written_ends_no_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EventListener(events.EventLog(tmp_path))("stepped", 9)
    assert "cannot be written: Is a directory: stepping {'iteration': 9}" in capsys.readouterr().out
