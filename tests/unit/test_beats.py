"""Beats: what is written is read, torn records are not believed, and writing is cheap."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ntp import beats
from megatron_ntp.beats import BeatWriter


def test_what_a_rank_says_is_read(tmp_path: Path) -> None:
    writer = BeatWriter(tmp_path, 3)
    (beat,) = beats.read(tmp_path).values()
    assert (beat.rank, beat.phase, beat.iteration, beat.pid) == (3, "start", -1, os.getpid())
    writer.say("load", 8)
    before = time.monotonic()
    writer.step_done(9)
    beat = beats.read(tmp_path)[3]
    assert (beat.phase, beat.iteration) == ("train", 9)
    assert before <= beat.since <= time.monotonic()
    assert list(beat.marks) == ["start", "load", "first-step"]
    assert beat.started + beat.marks["first-step"] == pytest.approx(beat.since)


def test_marks_keep_the_first_time(tmp_path: Path) -> None:
    writer = BeatWriter(tmp_path, 0)
    writer.say("train", 0)
    first = beats.read(tmp_path)[0]
    time.sleep(0.01)
    writer.say("save", 4)
    writer.say("train")
    last = beats.read(tmp_path)[0]
    assert last.marks["train"] == first.marks["train"] < last.marks["save"]
    assert last.since > first.since and last.iteration == 4


def test_the_start_of_the_process_is_known() -> None:
    program = (
        "import time; time.sleep(0.3); from megatron_ntp import beats;"
        "print(beats.process_started())"
    )
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert before - 0.02 <= float(done.stdout) <= before + 0.2


def test_no_folder_and_foreign_files(tmp_path: Path) -> None:
    assert beats.read(tmp_path / "none") == {}
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "rank-00001.beat").write_bytes(b"")
    assert beats.read(tmp_path) == {}


def test_a_torn_record_is_not_believed(tmp_path: Path) -> None:
    BeatWriter(tmp_path, 0).say("train", 5)
    path = tmp_path / "rank-00000.beat"
    good = path.read_bytes()
    assert beats.parse(good) is not None
    for at in range(len(good)):
        torn = bytearray(good)
        torn[at] ^= 0x10
        assert beats.parse(bytes(torn)) is None, at
    assert beats.parse(good[:-1]) is None
    path.write_bytes(good[:50] + bytes(len(good) - 50))
    assert beats.read(tmp_path) == {}


def _write_for(folder: Path, seconds: float) -> None:
    writer = BeatWriter(folder, 0)
    iteration, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        iteration += 1
        writer.step_done(iteration)


def test_a_reader_beside_a_writer_sees_whole_records(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write_for, args=(tmp_path, 1.0))
    process.start()
    seen = []
    while process.is_alive():
        seen += [beat.iteration for beat in beats.read(tmp_path).values()]
    process.join()
    assert len(seen) > 100 and seen == sorted(seen)
    assert process.exitcode == 0


def test_a_beat_costs_microseconds(tmp_path: Path) -> None:
    writer = BeatWriter(tmp_path, 0)
    fastest = 1.0
    for iteration in range(2000):
        start = time.perf_counter()
        writer.step_done(iteration)
        fastest = min(fastest, time.perf_counter() - start)
    assert fastest < 100e-6


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        BeatWriter(tmp_path / "none", 0)
