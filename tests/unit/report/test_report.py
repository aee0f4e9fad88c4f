"""The report of a log: attempts, what was lost, and goodput, worked out by hand here."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from megatron_ntp import cli
from megatron_ntp.events import EventLog
from megatron_ntp.report.attempts import CUT_SHORT, UNFINISHED, report
from megatron_ntp.report.command import LogError, load, text

START = datetime(2026, 11, 30, 1, 0, 0, tzinfo=UTC)


def event(at_s: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"time": (START + timedelta(seconds=at_s)).isoformat(), "event": name, **fields}


def started(at_s: float, number: int, degrees: list[int], checkpoint: int) -> dict[str, Any]:
    about = {"attempt": number, "degrees": degrees, "checkpoint": checkpoint, "planning_s": 0.25}
    return event(at_s, "attempt-started", health_s=0.5, **about)


# 2 attempts. The first: steps 1 to 11 in 2 s each but the first (10 s), a fault at 40 s seen at
# 42 s. The second goes on from the checkpoint of step 8 and ends with step 20.
LOG = [
    event(0, "supervisor-started"),
    event(1, "decision", reason="at 2,2", degrees=[2, 2]),
    started(2, 1, [2, 2], -1),
    event(20, "stepping", iteration=1),
    event(20.2, "first-step", attempt=1, step=1, start_s=6.0, load_s=2.0, first_step_s=10.0),
    event(36, "step-progress", attempt=1, step=8),
    event(42, "fault-detected", attempt=1, reason="rank 3 was killed", detection_s=2.0),
    event(45, "attempt-ended", attempt=1, status=137, step=11, stop_s=3.0),
    event(46, "decision", reason="at 2,1 of 2", degrees=[2, 1]),
    started(47, 2, [2, 1], 8),
    event(60, "stepping", iteration=9),
    event(60.2, "first-step", attempt=2, step=9, start_s=5.0, load_s=3.0, first_step_s=5.0),
    event(93, "trained", iteration=20),
    event(95, "attempt-ended", attempt=2, reason="all ranks ended", status=0, step=20, stop_s=0.1),
    event(100, "finished", status=0, reason="the training has finished"),
]


def test_attempts_and_what_they_lost() -> None:
    first, second = report(LOG).attempts
    assert (first.degrees, second.degrees) == ((2, 2), (2, 1))
    assert (first.resumed_at, first.reached, first.steps_lost) == (0, 11, 3)
    assert (second.resumed_at, second.reached, second.steps_lost) == (8, 20, 0)
    assert (first.reason, first.status) == ("rank 3 was killed", 137)
    assert (first.detection_s, first.stop_s, second.planning_s) == (2.0, 3.0, 0.25)
    assert (second.start_s, second.load_s, second.first_step_s) == (5.0, 3.0, 5.0)
    assert first.down_s == pytest.approx(20.0), "from the fault at 40 to the first step at 60"
    assert second.down_s is None


def test_goodput_counts_steps_that_were_not_done_again() -> None:
    found = report(LOG)
    # 8 steps of 2 s and 12 of 3 s: 52 s of 100 s
    assert found.num_useful_steps == 20
    assert found.useful_step_s == pytest.approx(8 * 2.0 + 12 * 3.0)
    assert found.goodput == pytest.approx(0.52)
    assert found.outcome == "finished: the training has finished"


def test_an_undisturbed_job_loses_nothing() -> None:
    log = [*LOG[:5], event(40, "trained", iteration=11)]
    found = report(log)
    assert found.steps_lost == 0 and found.num_useful_steps == 11
    assert found.goodput == pytest.approx(22 / 40)


def attempt(at_s: float, number: int, checkpoint: int, last: int) -> list[dict[str, Any]]:
    """An attempt at one step per second that a fault ends."""
    end_s = at_s + 1 + last - checkpoint
    return [
        started(at_s, number, [2, 2], checkpoint),
        event(at_s + 2, "stepping", iteration=checkpoint + 1),
        event(end_s, "fault-detected", attempt=number, reason="killed", detection_s=0.0),
        event(end_s, "attempt-ended", attempt=number, step=last),
    ]


def test_a_later_attempt_may_undo_the_steps_of_several() -> None:
    # the checkpoint of step 8 was damaged before the third
    log = [*attempt(0, 1, 0, 9), *attempt(20, 2, 8, 13), *attempt(40, 3, 4, 16)]
    assert [attempt.steps_lost for attempt in report(log).attempts] == [5, 5, 0]
    assert report(log).num_useful_steps == 16
    assert report(log).useful_step_s == pytest.approx(16.0)


def test_what_ranks_went_on_from_counts_not_what_the_supervisor_saw() -> None:
    log = [*attempt(0, 1, 0, 9), *attempt(20, 2, 8, 13)]
    log[5]["iteration"] = 5  # by content, the checkpoint of step 8 was not whole
    first, second = report(log).attempts
    assert (second.resumed_at, first.steps_lost) == (4, 5)


def test_a_supervisor_that_was_killed_leaves_an_attempt_without_end() -> None:
    log = [
        *LOG[:6],
        event(50, "supervisor-started"),
        event(50.1, "attempt-ended", attempt=1, reason=CUT_SHORT, status=None, step=10),
        started(52, 2, [2, 2], 8),
        event(60, "stepping", iteration=9),
    ]
    first, second = report(log).attempts
    assert (first.reason, first.reached, first.ended_s) == (CUT_SHORT, 10, 50.0)
    assert first.steps_lost == 2 and first.stepping_s is None
    assert second.ended_s is None
    assert report(log).outcome == UNFINISHED
    assert "running" in text(report(log))


def test_a_job_that_is_started_again_is_not_over() -> None:
    assert report([*LOG, event(110, "supervisor-started")]).outcome == UNFINISHED
    stopped = event(110, "finished", reason="no progress", status=93)
    assert report([*LOG[:-1], stopped]).outcome == "ended with status 93: no progress"


def test_faults_that_did_not_happen_are_told(tmp_path: Path) -> None:
    log = [
        *LOG[:3],
        event(3, "faults-armed", faults=["kill:rank=3@step=12", "kill:rank=3@step=99"]),
        event(39.5, "fault-injected", fault="kill:rank=3@step=12", rank=3, iteration=11),
        *LOG[3:],
    ]
    log.sort(key=lambda entry: entry["time"])
    found = report(log)
    assert found.faults_pending == ("kill:rank=3@step=99",)
    assert found.attempts[0].down_s == pytest.approx(20.5), "from the fault itself"
    assert "injected faults: 1 of 2 happened" in text(found)
    assert "WARNING: this fault has not happened: kill:rank=3@step=99" in text(found)
    path = write(tmp_path / "events.jsonl", log)
    assert cli.main(["report", str(path)]) == 1
    twice = [*log, event(100, "fault-injected", fault="kill:rank=3@step=99", rank=3)]
    assert report(twice).faults_pending == ()


def write(path: Path, log: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in log))
    return path


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "events.jsonl", LOG)
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:10] == "1 2,2 1-11 3 0.75 6.00 2.00 10.00 2.00 3.00".split()
    assert rows[1][10:] == "rank 3 was killed (status 137)".split()
    assert rows[2][:10] == "2 2,1 9-20 0 0.75 5.00 3.00 5.00 - 0.10".split()
    assert "finished: the training has finished, 2 attempts, 3 steps lost" in out
    assert "goodput 52.0%: 20 steps that were not done again, 52.0 s of 100.0 s" in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "events.jsonl", LOG)
    assert cli.main(["report", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["goodput"] == pytest.approx(0.52)
    assert [attempt["steps_lost"] for attempt in told["attempts"]] == [3, 0]


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib (extra `plot`)")
    path = write(tmp_path / "events.jsonl", LOG)
    picture = tmp_path / "job.png"
    assert cli.main(["report", str(path), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "none")]) == 2
    assert "there is no log" in capsys.readouterr().err
    (tmp_path / "job-7").mkdir()
    EventLog(tmp_path / "job-7" / "events.jsonl").write("supervisor-started")
    with pytest.raises(LogError, match=r"there are jobs job-7 in it: give one"):
        load(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(LogError, match="holds no event yet"):
        load(tmp_path / "empty.jsonl")
    assert "unfinished, 0 attempts" in text(load(tmp_path / "job-7"))


def test_a_torn_line_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "events.jsonl", LOG)
    with path.open("a") as file:
        file.write('{"event": "fin')
    assert cli.main(["report", str(path)]) == 0
    assert "skipped a torn line" in capsys.readouterr().err
