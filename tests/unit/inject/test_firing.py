"""Faults happen in the right rank, at the right moment, once per job, and by real means."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_ntp import events
from megatron_ntp.beats import ENV as BEATS
from megatron_ntp.checkpoint.choose import choose
from megatron_ntp.checkpoint.examine import contents, examine
from megatron_ntp.checkpoint.folder import Candidate, list_folder
from megatron_ntp.errors import CheckpointError
from megatron_ntp.inject.damage import damage
from megatron_ntp.inject.firing import FAULTS_ENV, Injector, from_command_line, own_device
from megatron_ntp.inject.grammar import How, InjectError, parse
from megatron_ntp.inject.log import FaultLog

ROOT = Path(__file__).resolve().parents[3]

# A rank of `num_steps` steps with saves every `interval`, without Megatron: only its moments.
RANK = """
import os, sys
from megatron_ntp.inject.firing import from_command_line
injector = from_command_line(sys.argv[3:], os.environ)
first, last = int(sys.argv[1]), int(sys.argv[2])
injector("start", -1)
injector("load", -1)
injector("loaded", first)
for step in range(first, last):
    injector("step", step)
    print("step", step + 1, flush=True)
    injector("stepped", step + 1)
    if (step + 1) % 4 == 0:
        injector("save", step + 1)
        injector("saved", step + 1)
injector("exit", last)
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(rank: int, text: str, first: int = 0, last: int = 10, **extra: str) -> object:
        environ = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), **extra}
        environ.setdefault(events.ENV, str(tmp_path / "events.jsonl"))
        words = ["--save", str(tmp_path / "saved"), "--ntp", "--ntp-inject", text]
        return subprocess.Popen(
            [sys.executable, "-c", RANK, str(first), str(last), *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )

    return start


def run(process: subprocess.Popen[str]) -> tuple[int, str]:
    output = process.communicate(timeout=30)[0]
    return process.returncode, output


def test_a_kill_in_its_step_and_never_again(start: Start, tmp_path: Path) -> None:
    text = "kill:rank=1@step=7"
    assert run(start(0, text))[0] == 0, "another rank's fault"
    status, output = run(start(1, text))
    assert status == -signal.SIGKILL
    assert "step 6" in output and "step 7" not in output
    status, output = run(start(1, text, first=4))
    assert status == 0 and "step 7" in output, "the restart repeats the step"
    noted = events.read(tmp_path / "events.jsonl")
    assert [event["event"] for event in noted] == ["faults-armed", "fault-injected"]
    assert noted[0]["faults"] == [text]
    fired = noted[1]
    assert (fired["fault"], fired["rank"], fired["iteration"]) == (text, 1, 6)


def test_a_fault_that_never_happens_is_told_by_rank_0(start: Start) -> None:
    text = "kill:rank=1@step=7; kill:rank=1@step=99"
    run(start(1, text))
    status, output = run(start(0, text))
    assert status == 0
    told = [line for line in output.splitlines() if "WARNING" in line]
    assert told == ["--ntp-inject WARNING: this fault has not happened: kill:rank=1@step=99"]
    assert "WARNING" not in run(start(1, text))[1], "one rank is enough"


def test_a_hang_stops_the_process(start: Start) -> None:
    process = start(0, "hang:rank=0@step=3")
    state = ""
    for _ in range(500):
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            break
        time.sleep(0.02)
    assert state == "T"
    process.send_signal(signal.SIGCONT)
    status, output = run(process)
    assert status == 0 and "step 10" in output, "it can go on: nothing else was done to it"


@pytest.mark.parametrize(
    ("moment", "seen", "unseen"),
    [("start", [], "step 1"), ("load", [], "step 1"), ("save", ["step 4"], "step 5"),
     ("save=8", ["step 8"], "step 9")],
)  # fmt: skip
def test_other_moments(start: Start, moment: str, seen: list[str], unseen: str) -> None:
    status, output = run(start(0, f"kill:rank=0@{moment}"))
    assert status == -signal.SIGKILL
    assert all(word in output for word in seen) and unseen not in output


def test_after_a_while(start: Start, tmp_path: Path) -> None:
    status, output = run(start(0, "kill:rank=0,after=0.4@step=2", last=10_000_000))
    assert status == -signal.SIGKILL and "step 3" in output
    (fired,) = [e for e in events.read(tmp_path / "events.jsonl") if e["event"] == "fault-injected"]
    assert fired["iteration"] == 1, "the step it counts from"


def test_a_lost_gpu_is_reported_and_takes_its_process_along(start: Start, tmp_path: Path) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("n0 3 old\n")
    environment = {
        FAULTS_ENV: str(faults),
        "SLURMD_NODENAME": "n1",
        "CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb",
    }
    text = "nvml-lost:gpu=GPU-bb,host=n1@step=2"
    assert run(start(0, text, **environment))[0] == 0
    assert run(start(1, text, **{**environment, "SLURMD_NODENAME": "n2"}))[0] == 0
    assert run(start(1, text, **environment))[0] == -signal.SIGKILL
    assert faults.read_text() == "n0 3 old\nn1 GPU-bb injected: GPU lost\n"


def test_the_device_of_a_rank() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4, 6", "LOCAL_RANK": "1"}
    assert own_device(visible) == "6"
    assert own_device({"LOCAL_RANK": "2"}) == "2"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    maker = checkpoints.Maker(tmp_path / "saved")
    maker.save(4)
    maker.save(8)
    return maker.path


def problems(folder: Path, name: str) -> tuple[str, ...]:
    checkpoint = examine(Candidate(folder / name, 0))
    return checkpoint.problems or tuple(contents(checkpoint))


def test_a_truncated_checkpoint_is_found_by_its_size(saved: Path) -> None:
    assert damage(saved, How.TRUNCATE).startswith("cut iter_0000008/")
    assert "bytes" in problems(saved, "iter_0000008")[0]
    chosen = choose(list_folder(saved)).chosen
    assert chosen is not None and chosen.name == "iter_0000004"


def test_a_flipped_bit_is_found_by_content_only(saved: Path) -> None:
    before = {path: path.stat().st_size for path in saved.rglob("*") if path.is_file()}
    told = damage(saved, How.FLIP)
    key = told.removeprefix("flipped a bit of ").partition(" in ")[0]
    whole = {"decoder.weight": (12, 8), "embedding.word_embeddings.weight": (16, 8)}[key]
    loaded = {key: torch.empty(whole)}
    dcp.load(loaded, checkpoint_id=str(saved / "iter_0000008"), no_dist=True)
    stored = torch.arange(float(loaded[key].numel())).view(whole)
    assert float((loaded[key] - stored).abs().max()) > 1.0, "a bit that matters"
    assert {path: path.stat().st_size for path in before} == before
    assert examine(Candidate(saved / "iter_0000008", 8)).is_whole
    assert problems(saved, "iter_0000008")
    chosen = choose(list_folder(saved), check_content=contents).chosen
    assert chosen is not None and chosen.name == "iter_0000004"


def test_a_removed_tracker(saved: Path) -> None:
    damage(saved, How.NO_TRACKER)
    chosen = choose(list_folder(saved)).chosen
    assert chosen is not None and chosen.name == "iter_0000008"
    with pytest.raises(CheckpointError, match="to remove"):
        damage(saved, How.NO_TRACKER)


def test_nothing_to_damage(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint to damage"):
        damage(tmp_path, How.FLIP)


def test_damage_comes_after_the_save(start: Start, saved: Path) -> None:
    status, output = run(start(0, "corrupt-checkpoint@save=8", first=4))
    assert status == 0 and "--ntp-inject: cut iter_0000008/" in output
    assert problems(saved, "iter_0000008") and not problems(saved, "iter_0000004")


def test_state_of_another_job_is_refused(tmp_path: Path) -> None:
    FaultLog(tmp_path, parse("kill:rank=1@step=7"))
    FaultLog(tmp_path, parse("kill:rank=1@step=7"))
    with pytest.raises(InjectError, match=r"belongs to a job with the faults kill:rank=1@step=7"):
        FaultLog(tmp_path, parse("kill:rank=1@step=8"))


def test_a_fault_is_claimed_once(tmp_path: Path) -> None:
    faults = parse("kill:rank=1@step=7; kill:rank=1@step=7")
    log, other = FaultLog(tmp_path, faults), FaultLog(tmp_path, faults)
    assert log.claim(0) and not other.claim(0)
    assert other.pending == (faults[1],) and not other.has_happened(1)
    assert json.loads((tmp_path / "00-kill.json").read_text())["pid"] == os.getpid()


def test_what_a_fault_needs(tmp_path: Path) -> None:
    log = FaultLog(tmp_path / "a", parse("nvml-lost:rank=1@step=2"))
    with pytest.raises(InjectError, match=r"launch --faults FILE"):
        Injector(log, {"RANK": "0"}, None)
    log = FaultLog(tmp_path / "b", parse("corrupt-checkpoint@save"))
    with pytest.raises(InjectError, match=r"add --save"):
        Injector(log, {"RANK": "0"}, None)
    with pytest.raises(InjectError, match=r"add --ntp-inject-state DIR"):
        from_command_line(["--ntp", "--ntp-inject", "kill:rank=1@step=2"], {})
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InjectError, match=r"cannot be written"):
        FaultLog(file / "x", parse("kill:rank=1@step=2"))


def test_without_the_flag_nothing_is_imported() -> None:
    program = (
        "import sys; sys.argv[1:] = ['--ntp', '--lr', '1']; from megatron_ntp import watching;"
        "watching.begin(sys.argv[1:]); watching.watch();"
        "parts = ('megatron_ntp.inject', 'megatron_ntp.integration', 'megatron.');"
        "sys.exit(any(name.startswith(parts) for name in sys.modules))"
    )
    environment = {key: value for key, value in os.environ.items() if key != BEATS}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0
