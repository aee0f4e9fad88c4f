"""`megatron-ntp plan`: the table, the file, and one clear error for what does not make a plan."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ntp import cli
from megatron_ntp.plan import Plan
from megatron_ntp.plan_command import padded_vocab_size

LLAMA = (
    "--heads 32 --query-groups 8 --kv-channels 128 --hidden 4096 --ffn 14336 --vocab 128256 "
    "--layers 32 --swiglu"
).split()
JOB = "--tp 8 --replicas 3 --failed 2:5".split()


def test_prints_the_table_and_writes_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["plan", *JOB, *LLAMA, "--policy", "redistribute", "-o", str(path)]) == 0
    plan = Plan.load(path)
    assert plan.topology.degrees == (8, 8, 7)
    assert plan.topology.failed == ((2, 5),)
    assert plan.batch_policy == "redistribute"
    assert dict(plan.model.sizes()) == {
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "padded_vocab_size": 129024,
        "num_layers": 32,
        "mlp_matrices": 3,
    }
    printed = capsys.readouterr().out
    assert printed.startswith(plan.table())
    assert f"--ntp --ntp-plan {path}" in printed


def test_shows_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    cli.main(["plan", *JOB, *LLAMA, "-o", str(path)])
    capsys.readouterr()
    assert cli.main(["plan", "show", str(path)]) == 0
    assert capsys.readouterr().out == Plan.load(path).table()


def test_degrees_in_place_of_failed_slots(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert cli.main(["plan", "--tp", "8", "--degrees", "8,8,7", *LLAMA, "-o", str(path)]) == 0
    assert Plan.load(path).topology.failed == ((2, 7),)


def test_sizes_that_megatron_derives(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sizes = "--heads 16 --hidden 256 --vocab 50257 --layers 2".split()
    assert cli.main(["plan", "--tp", "4", "--degrees", "4,3", *sizes, "-o", str(path)]) == 0
    model = Plan.load(path).model
    assert (model.num_query_groups, model.kv_channels) == (16, 16)
    assert (model.ffn_hidden_size, model.mlp_matrices) == (1024, 2)
    assert model.padded_vocab_size == 50688


@pytest.mark.parametrize(
    ("size", "divisor", "tp", "padded"),
    [(50257, 128, 8, 51200), (1024, 128, 8, 1024), (250, 13, 4, 260), (1, 1, 1, 1)],
)
def test_vocabulary_is_padded_as_megatron_does(
    size: int, divisor: int, tp: int, padded: int
) -> None:
    assert padded_vocab_size(size, divisor, tp) == padded


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "8", "--replicas", "3", *LLAMA], "--failed REPLICA:SLOT"),
        (["--tp", "8", "--failed", "2:5", *LLAMA], "--replicas"),
        (["--tp", "8", "--replicas", "3", "--failed", "2:9", *LLAMA], "2:9"),
        (["--tp", "8", "--replicas", "3", "--failed", "2", *LLAMA], "replica:slot"),
        (["--tp", "8", "--replicas", "2", "--degrees", "8,8,7", *LLAMA], "num_replicas 2"),
        (["--tp", "8", "--degrees", "9,8", *LLAMA], "above the nominal TP 8"),
        (["--tp", "0", "--degrees", "8,7", *LLAMA], "--tp must be at least 1"),
        ([*JOB, *LLAMA, "--vocab", "0"], "--vocab must be at least 1"),
        ([*JOB, *LLAMA, "--query-groups", "5"], "multiple of num_query_groups"),
        ([*JOB, *LLAMA, "--query-groups", "4"], "kv_group"),
        ([*JOB, *"--heads 3 --hidden 8 --vocab 9 --layers 1".split()], "--kv-channels"),
        ([*JOB, *LLAMA, "-o", "/no/such/folder/plan.json"], "/no/such/folder/plan.json"),
        (["show", "/no/such/plan.json"], "/no/such/plan.json"),
    ],
)
def test_bad_input_gives_one_error_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("megatron-ntp plan: Plan")
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["--tp", "x"], [*JOB, *LLAMA, "--policy", "x"], ["show"]])
def test_wrong_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *words])
    assert ended.value.code == 2
    assert "usage: megatron-ntp plan" in capsys.readouterr().err


def test_needs_no_torch() -> None:
    program = (
        "import sys; from megatron_ntp import cli; "
        f"cli.main({['plan', *JOB, *LLAMA]!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0
