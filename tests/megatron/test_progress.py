"""Ranks say how far they are, in Megatron's own loop, with --ntp and without; faults happen there.

Without --ntp nothing of Megatron is changed for it.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jobs
import pytest
from ranks import RanksFailed, run_training
from versions import CORES

from megatron_ntp import beats, events
from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.folder import list_folder

STEPS = 6
SAVE_EVERY = 2
ORDER = ["start", "setup", "load", "train", "first-step", "save", "eval", "done"]
EVALUATES = ("--eval-iters", "1", "--eval-interval", str(STEPS - 1))
WATCHED_MODULES = ("megatron.training.training", "megatron.training.checkpointing")

_before: dict[str, dict[str, Any]] = {}


def argv(save: Path, *flags: str) -> list[str]:
    return [
        *jobs.GPT2.argv(2),
        *jobs.DISTRIBUTED,
        *("--train-iters", str(STEPS), "--global-batch-size", "2"),
        *("--save", str(save), "--load", str(save), "--save-interval", str(SAVE_EVERY)),
        *flags,
    ]


def _attributes(module: ModuleType) -> dict[str, Any]:
    return {name: id(value) for name, value in vars(module).items() if callable(value)}


def note_attributes() -> None:
    _before.update({name: _attributes(sys.modules[name]) for name in WATCHED_MODULES})


def changed_attributes() -> list[str]:
    return [
        f"{name}:{key}"
        for name, before in _before.items()
        for key, value in _attributes(sys.modules[name]).items()
        if before.get(key, value) != value
    ]


@pytest.mark.parametrize("core", CORES, ids=str)
def test_a_plain_job_reports_and_is_not_touched(core: Path | None, tmp_path: Path) -> None:
    folder = tmp_path / "beats"
    folder.mkdir()
    training = run_training(
        argv(tmp_path / "saved", *EVALUATES),
        2,
        core=core,
        environment={beats.ENV: str(folder)},
        before=note_attributes,
        after=changed_attributes,
    )
    assert training.results == [[], []]
    found = beats.read(folder)
    assert sorted(found) == [0, 1]
    for beat in found.values():
        assert (beat.phase, beat.iteration) == ("done", STEPS)
        marks = sorted(beat.marks, key=lambda name: beat.marks[name])
        assert marks == [name for name in ORDER if name != "load" or "load" in beat.marks]
        assert {"start", "setup", "train", "first-step", "save", "eval", "done"} <= set(marks)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job at 2+1 whose last rank was killed in step 4, and its folder."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "beats").mkdir()
    with pytest.raises(RanksFailed) as caught:
        train(folder)
    assert caught.value.run.statuses[2] == -signal.SIGKILL
    return folder


def train(folder: Path) -> Any:
    flags = ["--ntp", "--ntp-degrees", "2,1", "--ntp-load", "or-scratch"]
    flags += ["--ntp-inject", "kill:rank=2@step=4"]
    environment = {beats.ENV: str(folder / "beats"), events.ENV: str(folder / "events.jsonl")}
    return run_training(argv(folder / "saved", *flags), 3, environment=environment)


def test_a_rank_is_killed_in_its_step(killed: Path) -> None:
    found = beats.read(killed / "beats")
    assert found[2].iteration == 3 and found[2].phase == "train"
    assert all(beat.iteration == 3 for beat in found.values()), "its peers wait in step 4"
    chosen = choose(list_folder(killed / "saved")).chosen
    assert chosen is not None and chosen.name == "iter_0000002"
    noted = events.read(killed / "events.jsonl")
    assert [event["event"] for event in noted] == ["faults-armed", "stepping", "fault-injected"]
    assert noted[1]["iteration"] == 1


def test_the_restart_goes_on_and_is_spared(killed: Path) -> None:
    training = train(killed)
    assert re.search(r"loading .*iter_0000002", training.stdout[0])
    noted = events.read(killed / "events.jsonl")
    stepping, trained = noted[-2:]
    assert (stepping["event"], stepping["iteration"]) == ("stepping", 3)
    assert (trained["event"], trained["iteration"]) == ("trained", STEPS)
    for beat in beats.read(killed / "beats").values():
        assert (beat.phase, beat.iteration) == ("done", STEPS)
        assert beat.marks["start"] < beat.marks["load"] < beat.marks["train"]
        assert beat.marks["train"] < beat.marks["first-step"] < beat.marks["save"]


def test_a_fault_that_cannot_be_understood_stops_the_job_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_training(argv(tmp_path, "--ntp", "--ntp-inject", "explode:rank=2@step=4"), 1)
    (error,) = caught.value.run.stderr
    assert "megatron-ntp: error: --ntp-inject, fault 'explode:rank=2@step=4': no kind" in error
    assert caught.value.run.statuses == [2]
