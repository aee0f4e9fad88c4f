"""The doctor: each finding, its cure, the exit status, and that it leaves everything as it was."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ntp import settings
from megatron_ntp.doctor import command, job, machine, megatron, software
from megatron_ntp.doctor.findings import Finding, Verdict, as_json, as_table, fail, note, ok, warn
from megatron_ntp.integration.refusals import refuse_unsupported

GPT = "pretrain_gpt.py --tensor-model-parallel-size 8 --hidden-size 64 --num-attention-heads 16"


def verdicts(findings: Sequence[Finding]) -> list[str]:
    return [finding.verdict.value for finding in findings]


def text(findings: Sequence[Finding]) -> str:
    return " | ".join(f"{f.subject}: {f.verdict}: {f.what} -> {f.cure}" for f in findings)


# --- findings


def test_table_and_json_say_the_same() -> None:
    found = [ok("Python", "3.12"), warn("GPUs", "word " * 40, "look"), fail("torch", "no", "get")]
    table = as_table(found, 80)
    assert "Python  ok    3.12" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "-> look" in table and "-> get" in table
    assert "1 to repair" in table
    shown = json.loads(as_json(found))
    assert shown["works"] is False
    assert [row["verdict"] for row in shown["findings"]] == ["ok", "warn", "fail"]
    assert json.loads(as_json([note("a", "b")]))["works"] is True
    assert "all in order" in as_table([ok("a", "b")])
    assert "1 thing(s) to look at" in as_table([warn("a", "b")])


# --- command


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other checks say nothing."""
    for name in ("check_machine", "check_software"):
        monkeypatch.setattr(command, name, list)
    monkeypatch.setattr(command, "check_megatron", lambda path: [ok("megatron-core", str(path))])


@pytest.mark.usefixtures("quiet")
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.doctor([]) == 0
    assert "megatron-core  ok    None" in capsys.readouterr().out
    assert command.doctor(["--json", "/tree", "--", *GPT.split(), "--ntp-degrees", "8,7"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["findings"][0]["what"] == "/tree"
    assert shown["findings"][1]["cure"] == "add --ntp, or remove them"
    with pytest.raises(SystemExit) as caught:
        command.doctor(["a", "b"])
    assert caught.value.code == 2


def test_it_runs_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.doctor(["--json"]) in (0, 1)
    subjects = {row["subject"] for row in json.loads(capsys.readouterr().out)["findings"]}
    assert {"machine", "driver", "Python", "torch", "megatron-core"} <= subjects


# --- software


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str] = {"torch": "2.5.1"}
    monkeypatch.setattr(software, "installed", versions.get)
    monkeypatch.setattr(software, "torch_cuda", lambda: None)
    found = text(software.check_software())
    assert "torch: FAIL: 2.5.1, built for CPU only -> megatron-ntp needs torch 2.6" in found
    assert "psutil is not installed" in found and "pip install psutil" in found
    assert "nvidia-ml-py is not installed" in found
    assert "neither Transformer Engine nor Apex" in found
    versions.clear()
    assert "torch: FAIL: is not installed" in text(software.check_software())
    versions.update({"torch": "2.10.0+cu129", "transformer-engine": "2.9", "apex": "0.1"})
    found = text(software.check_software())
    assert "torch: ok: 2.10.0+cu129" in found and "Transformer Engine 2.9, Apex 0.1" in found


def test_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PYTHONS", ((3, 9),))
    assert "needs Python 3.12 or 3.13" in text(software.check_software())


# --- machine


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_DRIVER_VERSION", tmp_path / "gone")
    found = machine.check_machine()
    assert "no NVIDIA driver is loaded" in text(found)
    assert Verdict.FAIL not in {finding.verdict for finding in found}


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("580.65.06", "13.0", "driver: ok: 580.65.06, fits torch's CUDA 13.0"),
        ("535.104", "13.0", "driver: FAIL: 535.104 is too old for torch's CUDA 13.0"),
        ("535.104", "12.8", "driver: ok"),
        ("535.104", None, "driver: FAIL: 535.104, but torch was built for CPU only"),
        ("999", "99.1", "driver: ok"),
    ],
)
def test_driver_and_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, cuda: str | None, expected: str
) -> None:
    (tmp_path / "version").write_text(version + "\n")
    monkeypatch.setattr(machine, "_DRIVER_VERSION", tmp_path / "version")
    monkeypatch.setattr(machine, "torch_cuda", lambda: cuda)
    monkeypatch.setattr(machine, "_gpus", list)
    assert expected in text(machine.check_machine())


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MIN_SHM_BYTES", 1 << 60)
    assert "--ipc=host" in text(machine._shared_memory())
    monkeypatch.setattr(machine, "MIN_SHM_BYTES", 0)
    assert machine._shared_memory() == []


# --- Megatron


def make_tree(root: Path, version: tuple[int, int, int] = (0, 19, 0)) -> Path:
    """A tree with a version, a training loop and nothing that could be patched."""
    for part in ("core", "training"):
        (root / "megatron" / part).mkdir(parents=True)
        (root / "megatron" / part / "__init__.py").write_text("from .training import pretrain\n")
    major, minor, patch = version
    (root / "megatron" / "core" / "package_info.py").write_text(
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"
    )
    (root / "megatron" / "training" / "training.py").write_text("def train_step(): ...\n")
    return root


def test_a_tree_whose_targets_are_gone(tmp_path: Path) -> None:
    found = text(megatron.check_megatron(make_tree(tmp_path / "m")))
    assert "checkout: ok: 0.19.0" in found
    assert "patches: FAIL: megatron.training.training:train_step: changed" in found
    assert "FAIL: megatron.core.parallel_state:initialize_model_parallel: missing" in found
    assert "docs/maintainers.md" in found


def test_process_groups_that_are_not_known(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "m")
    source = tree / "megatron" / "core" / "parallel_state.py"
    source.write_text("_DATA_PARALLEL_GROUP = None\n_MPU_RANK = 1\n")
    assert "process groups" not in text(megatron.check_megatron(tree))
    source.write_text(
        "_DATA_PARALLEL_GROUP = None\n_NEW_GROUPS = {}\n_OTHER_GROUP: int | None = None\n"
    )
    found = text(megatron.check_megatron(tree))
    assert "process groups: FAIL: not known: _NEW_GROUPS, _OTHER_GROUP" in found


def test_an_untested_version_is_said_once(tmp_path: Path) -> None:
    found = megatron.check_megatron(make_tree(tmp_path / "m", (0, 25, 0)))
    assert "0.25.0" in text(found) and "was never tested" in text(found)
    assert verdicts(found).count("FAIL") == 1


def test_what_is_not_a_checkout(tmp_path: Path) -> None:
    assert "is not a Megatron-LM checkout" in text(megatron.check_megatron(tmp_path))
    tree = make_tree(tmp_path / "m")
    (tree / "megatron" / "training" / "training.py").unlink()
    assert "has no megatron.training" in text(megatron.check_megatron(tree))


def test_no_megatron_and_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(megatron, "find_cores", list)
    assert "cannot import any" in text(megatron.check_megatron(None))
    trees = [make_tree(tmp_path / name) for name in ("a", "b")]
    monkeypatch.setattr(megatron, "find_cores", lambda: trees)
    found = text(megatron.check_megatron(None))
    assert f"a second one could be imported: 0.19.0 in {trees[1]}" in found


# --- flags of a job


def flags(words: str) -> list[Finding]:
    return job.check_flags(words.split())


def test_nothing_given_is_refused_by_no_row() -> None:
    """The namespace must look to every row of the refusals as if no flag were given."""
    refuse_unsupported(job.GivenWords([]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (GPT, "no --ntp among them"),
        (f"{GPT} --ntp-degrees 8,7", "--ntp-... flags without --ntp"),
        (f"{GPT} --ntp --ntp-degres 8,7", "no such flag: --ntp-degres"),
        (f"{GPT} --ntp --ntp-batch-policy grow", "invalid choice"),
        (f"{GPT} --ntp --ntp-config gone.yaml", "cannot be read"),
        (f"{GPT} --ntp --ntp-degrees 9,7", "above the nominal TP 8"),
        (f"{GPT} --ntp --ntp-failed 1:8", "slot 8 is outside 0..7"),
        (f"{GPT} --ntp --ntp-plan gone.json", "gone.json"),
        (f"{GPT} --ntp --ntp-degrees 8,7 --num-experts 8", "MoE"),
        (f"{GPT} --ntp --ntp-degrees 8,7 --num-experts=8", "MoE"),
        (f"{GPT} --ntp --ntp-degrees 8,7 --fp8-format hybrid", "--fp8-format"),
        (f"{GPT} --ntp --ntp-degrees 8,7 --optimizer muon", "--optimizer muon"),
        (f"{GPT} --ntp --ntp-degrees 8,7 --context-parallel-size 2", "context"),
        (
            f"{GPT} --ntp --ntp-degrees 8,7 --group-query-attention --num-query-groups 4",
            "4",
        ),
    ],
)
def test_flags_that_will_not_do(words: str, expected: str) -> None:
    found = flags(words)
    assert expected in text(found)
    if " --ntp " in words or "--ntp-" in words:
        assert "FAIL" in verdicts(found)


def test_flags_that_will_do() -> None:
    found = flags(f"{GPT} --ntp --ntp-degrees 8,8,7 --context-parallel-size 1 --optimizer adam")
    assert "FAIL" not in verdicts(found)
    assert "degrees 8,8,7 of TP 8: 23 processes" in text(found)
    assert "1.20 x the time" in text(found)
    found = flags(f"{GPT} --ntp --ntp-failed 0:3,1:0 --ntp-batch-policy shrink")
    assert verdicts(found) == ["ok", "note", "ok"]
    assert "nothing will be resharded" in text(flags(f"{GPT} --ntp"))
    assert "model sizes are not among them" in text(
        flags("--tensor-model-parallel-size 2 --ntp --ntp-degrees 2,1 --foo")
    )


def test_flags_from_a_settings_file(tmp_path: Path) -> None:
    path = tmp_path / "ntp.yaml"
    path.write_text("ntp-degrees: 8,8,7\n")
    assert "23 processes" in text(flags(f"{GPT} --ntp --ntp-config {path}"))
    path.write_text("ntp-degree: 8,8,7\n")
    assert "Did you mean ntp-degrees" in text(flags(f"{GPT} --ntp --ntp-config {path}"))
    assert settings.config_path(["--ntp-config", "x"]) == "x"


@pytest.mark.parametrize(
    ("flags", "ffn_hidden_size", "mlp_matrices"),
    [([], 256, 2), (["--swiglu"], 128, 3), (["--quick-geglu"], 256, 3)],
)
def test_the_mlp_that_flags_describe(
    flags: list[str], ffn_hidden_size: int, mlp_matrices: int
) -> None:
    words = ["--hidden-size", "64", "--num-attention-heads", "4", *flags]
    dims = job.model_dims(job.GivenWords(words))
    assert dims is not None
    assert (dims.ffn_hidden_size, dims.mlp_matrices) == (ffn_hidden_size, mlp_matrices)
