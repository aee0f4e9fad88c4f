"""The event log: whole lines from several writers, torn ones skipped and left behind."""

import json
import multiprocessing
import warnings
from datetime import datetime
from pathlib import Path

import pytest

from megatron_ntp import events
from megatron_ntp.events import EventLog


def test_events_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("attempt-started", attempt=1, degrees=[2, 1])
    log.write("attempt-ended", attempt=1, reason="rank 2 was killed", path=tmp_path)
    first, second = events.read(path)
    assert first["event"] == "attempt-started" and first["degrees"] == [2, 1]
    assert second["path"] == str(tmp_path)
    assert datetime.fromisoformat(first["time"]) <= datetime.fromisoformat(second["time"])
    assert first["time"].endswith("Z")


def _write_many(path: Path, writer: int) -> None:
    log = EventLog(path)
    for number in range(200):
        log.write("health", writer=writer, number=number, filler="x" * 300)


def test_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, n)) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = events.read(path)
    assert len(found) == 600
    for n in range(3):
        assert [e["number"] for e in found if e["writer"] == n] == list(range(200))


def test_a_torn_line_is_skipped_and_closed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("one")
    with path.open("a") as file:
        file.write('{"event": "two", "ti')
    with pytest.warns(UserWarning, match=r"events.jsonl:2: skipped a torn line of 20 bytes"):
        assert [event["event"] for event in events.read(path)] == ["one"]
    log.write("three")
    with pytest.warns(UserWarning, match=":2:"):
        assert [event["event"] for event in events.read(path)] == ["one", "three"]


def test_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(ValueError, match="JSON"):
        EventLog(path).write("finished", seconds=float("nan"))
    EventLog(path).write("finished", seconds=1.5)
    assert json.loads(path.read_text())["seconds"] == 1.5


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        events.read(tmp_path / "none")
