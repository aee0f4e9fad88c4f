"""One node's part of a job: the commands, and real torchruns of two nodes on this machine."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import free_port

from megatron_ntp.errors import UnsupportedFlagError
from megatron_ntp.launchers import command
from megatron_ntp.launchers.nodes import Node, Placement, Shape, Slot, place
from megatron_ntp.launchers.start import agent_command, tail_with_error, training_command

ROOT = Path(__file__).resolve().parents[3]


def two_nodes(dead: bool = True) -> Placement:
    broken = Node("n1", (Slot(None, "dead") if dead else Slot("0"), Slot("1")))
    return place([broken, Node("n2", (Slot("4"), Slot("5")))], Shape(tp=2, gpus_per_node=2))


def test_failed_slots_are_added_to_the_training_command() -> None:
    words = ["pretrain.py", "--ntp", "--lr", "1"]
    assert training_command(words, two_nodes(dead=False)) == [sys.executable, *words]
    found = training_command(["python", *words], two_nodes())
    assert found == ["python", *words, "--ntp-failed", "0:0"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("python x.py", "add --ntp to"),
        ("python x.py --ntp --ntp-failed 1:1", "remove --ntp-failed from"),
        ("python x.py --ntp --ntp-degrees=2,1", "remove --ntp-degrees=2,1 from"),
    ],
)
def test_a_command_that_cannot_go_on(words: str, told: str) -> None:
    training_command(words.split(), two_nodes(dead=False))
    with pytest.raises(UnsupportedFlagError, match=told):
        training_command(words.split(), two_nodes())


def test_torchrun_of_an_agent() -> None:
    placement = two_nodes()
    found = " ".join(
        agent_command(1, placement.agents[1], placement, ("n2", 5), Path("/logs"), ["train"])
    )
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 1" in found
    assert found.endswith("megatron_ntp.launchers.rank /logs train")


def test_the_end_of_a_large_output(tmp_path: Path) -> None:
    """Of a long run; only its end is read."""
    quiet, loud = tmp_path / "quiet.log", tmp_path / "loud.log"
    quiet.write_text("done\n")
    with loud.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nstep 7\nValueError: wrong\n")
    found = tail_with_error([tmp_path / "none", quiet, loud])
    assert found is not None and found.startswith(f"last lines of {loud}:")
    assert found.endswith("\n  step 7\n  ValueError: wrong")


# --- real ones

if importlib.util.find_spec("torch") is None:
    pytest.skip("the rest needs torch in this Python", allow_module_level=True)


def start(
    tmp_path: Path, placement: Placement, script: str, port: int
) -> dict[str, subprocess.Popen]:
    """`nodes start` on both nodes."""
    (tmp_path / "placement.json").write_text(placement.to_json())
    (tmp_path / "train.py").write_text(script)
    words = f"{sys.executable} -m megatron_ntp nodes start placement.json --logs logs"
    words += f" --master-addr 127.0.0.1 --master-port {port} -- train.py --ntp"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {
        host: subprocess.Popen(
            words.split(),
            cwd=tmp_path,
            env={**environ, "SLURMD_NODENAME": host},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in ("n1", "n2")
    }


def log(tmp_path: Path, name: str) -> str:
    return (tmp_path / "logs" / name).read_text()


@pytest.mark.slow
def test_two_nodes_with_different_process_counts(tmp_path: Path) -> None:
    script = """
import os, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")
print(*(os.environ[name] for name in names), *sys.argv[1:], flush=True)
"""
    nodes = start(tmp_path, two_nodes(), script, free_port())
    output = {host: process.communicate(timeout=240)[0] for host, process in nodes.items()}
    assert {host: process.returncode for host, process in nodes.items()} == {"n1": 0, "n2": 0}, (
        output
    )
    flags = "--ntp --ntp-failed 0:0"
    assert log(tmp_path, "rank-00000.n2.log") == f"0 3 0 4,5 {flags}\n"
    assert log(tmp_path, "rank-00001.n2.log") == f"1 3 1 4,5 {flags}\n"
    assert log(tmp_path, "rank-00002.n1.log") == f"2 3 0 1 {flags}\n"
    assert log(tmp_path, "exit.n1") == log(tmp_path, "exit.n2") == "0\n"


@pytest.mark.slow
def test_signals_and_statuses(tmp_path: Path) -> None:
    """SIGUSR1 asks ranks to save; the node of a rank that ends with 93 says so.

    What a rank has left behind, as a killed one leaves its checkpoint writer, ends with the node.
    """
    script = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
if rank == 0:
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path("left").write_text(str(left.pid))
def saved(number, frame):
    print("saved", flush=True)
    sys.exit(93 if rank == 0 else 0)
signal.signal(signal.SIGTERM, saved)
print("ready", signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN, flush=True)
time.sleep(200)
"""
    nodes = start(tmp_path, two_nodes(dead=False), script, free_port())
    deadline = time.monotonic() + 200
    while sum("ready" in path.read_text() for path in (tmp_path / "logs").glob("rank-*")) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    for process in nodes.values():
        process.send_signal(signal.SIGUSR1)
    output = {host: process.communicate(timeout=120)[0] for host, process in nodes.items()}
    assert "asking ranks to save" in output["n1"]
    for path in (tmp_path / "logs").glob("rank-*"):
        assert path.read_text() == "ready True\nsaved\n"
    assert log(tmp_path, "exit.n1") == "93\n" and nodes["n1"].returncode == 93
    assert log(tmp_path, "exit.n2") == "0\n" and nodes["n2"].returncode == 0
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))
    assert "rank 0" in output["n1"] and "ended with status 93" in output["n1"]


@pytest.mark.slow
def test_ranks_that_torchrun_has_yet_to_start_are_asked_too(tmp_path: Path) -> None:
    """They have nothing to save, and must not train on into the time limit."""
    nodes = start(tmp_path, two_nodes(dead=False), "import time; time.sleep(200)", free_port())
    for process in nodes.values():
        while not psutil.Process(process.pid).children():
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
    for process in nodes.values():
        process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM


def test_commands_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """check, place and their errors through the command line."""
    checks = tmp_path / "checks"
    environ = dict(os.environ)
    try:
        for host in ("n1", "n2"):
            os.environ.update(SLURMD_NODENAME=host, CUDA_VISIBLE_DEVICES="0,1,2,3")
            (tmp_path / "faults").write_text("n1 2 dead\n")
            words = f"check --gpus-per-node 4 --output {checks} --faults {tmp_path / 'faults'}"
            assert command.nodes(words.split()) == 0
    finally:
        os.environ.clear()
        os.environ.update(environ)
    output = tmp_path / "placement.json"
    words = f"place --checks {checks} --hosts n1,n2 --gpus-per-node 4 --tp 4 --output {output}"
    assert command.nodes(words.split()) == 0
    assert "without n1 slot 2: dead" in capsys.readouterr().out
    assert Placement.from_json(output.read_text()).failed == "0:2"
    assert command.nodes(words.replace("n1,n2", "n1,n3").split()) == 2
    assert "Drop the replica" in capsys.readouterr().err
    assert command.nodes(["start", str(output), "--logs", str(tmp_path)]) == 93
    assert command.nodes(["start", "gone", "--logs", str(tmp_path), "--", "x.py"]) == 93
    assert command.nodes(["start", str(output), "--logs", str(tmp_path), "--", "x.py"]) == 93
    assert "add --ntp to the training command" in capsys.readouterr().err
