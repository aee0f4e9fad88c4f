"""The checkout patcher on real Megatron-LM trees.

Runs when MEGATRON_LM_PATH names a checkout (or several, separated as in PATH). The trees are
copied; the originals are only read.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flags import MODEL

from megatron_ntp.patching import checkout as trees
from megatron_ntp.patching.cli import patch_main

ROOT = Path(__file__).resolve().parents[2]
GIVEN = [Path(part) for part in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if part]
SCRIPTS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py", "pretrain_vlm.py")

if not GIVEN:
    pytest.skip(
        "set MEGATRON_LM_PATH to a Megatron-LM checkout to run this level", allow_module_level=True
    )

# Stands in for the plugin: says what it found when the hook called it, and ends the process.
STAND_IN = """
import os
import sys

def install_from_argv():
    training = sys.modules["megatron.training"]
    assert callable(training.pretrain) and callable(training.print_rank_last)
    main = sys.modules["__main__"]
    print("hook called, pretrain taken:", hasattr(main, "pretrain"), flush=True)
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def no_other_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "find_cores", list)


@pytest.fixture(scope="module", params=GIVEN, ids=lambda path: path.name)
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a checkout, without its history."""
    copy = tmp_path_factory.mktemp("checkout") / "Megatron-LM"
    shutil.copytree(request.param, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    return copy


def image(root: Path) -> dict[str, bytes]:
    """Every file of a tree with its mode and bytes."""
    return {
        str(path.relative_to(root)): oct(path.lstat().st_mode).encode()
        + (os.readlink(path).encode() if path.is_symlink() else path.read_bytes())
        for path in sorted(root.rglob("*"))
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    }


def patch(*argv: object) -> int:
    return patch_main([str(part) for part in argv])


def flags_for(tree: Path) -> list[str]:
    """What apply needs for this version: nothing, or --force outside the tested range."""
    reasons = trees.refusals(trees.inspect_checkout(tree))
    assert all("is not a version" in reason for reason in reasons), reasons
    return ["--force"] if reasons else []


def test_apply_diff_revert(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = image(tree)
    force = flags_for(tree)
    assert patch("diff", *force, tree) == 0
    shown = capfd.readouterr().out
    added = [line[1:] for line in shown.splitlines() if line.startswith("+") and line[1] != "+"]
    removed = [line for line in shown.splitlines() if line.startswith("-") and line[1] != "-"]
    assert shown.count("\n--- a/") + shown.startswith("--- a/") == 1
    assert not removed
    assert len(added) <= 15
    assert patch("apply", *force, tree) == 0
    changed = {name for name, content in image(tree).items() if before.get(name) != content}
    assert changed == {"megatron/training/__init__.py"}
    assert "\n".join(added) in (tree / "megatron/training/__init__.py").read_text()
    assert patch("apply", *force, tree) == patch("status", tree) == 0
    assert patch("revert", tree) == 0
    assert image(tree) == before


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_comes_to_the_hook_before_it_takes_pretrain(
    tree: Path, tmp_path: Path, script: str
) -> None:
    if not (tree / script).exists():
        pytest.skip(f"this checkout has no {script}")
    (tmp_path / "megatron_ntp.py").write_text(STAND_IN)
    patch("apply", *flags_for(tree), tree)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    argv = [sys.executable, "-W", "ignore", str(tree / script), "--ntp"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=False)
    patch("revert", tree)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hook called, pretrain taken: False" in done.stdout


# Plain Python runs a script of the patched checkout as one of three ranks, without GPUs.
ONE_OF_THREE = """
import os, runpy, sys
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", CUDA_VISIBLE_DEVICES="")
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
from megatron_ntp import cpu_runtime
cpu_runtime.install()
sys.argv += cpu_runtime.cpu_arguments()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HYBRID = ["--hybrid-layer-pattern", "M-M-"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "named"),
    [
        ("pretrain_mamba.py", HYBRID, "--hybrid-layer-pattern M-M-: Mamba and hybrid models"),
        ("pretrain_hybrid.py", HYBRID, "--hybrid-layer-pattern M-M-: Mamba and hybrid models"),
        ("pretrain_vlm.py", [], "pretrain_vlm.py (it adds --freeze-LM): multimodal models"),
    ],
)
def test_scripts_of_other_models_are_refused_by_name(
    tree: Path, script: str, flags: list[str], named: str
) -> None:
    if not (tree / script).exists():
        pytest.skip(f"this checkout has no {script}")
    if flags_for(tree):
        pytest.skip("the run-time patches are not for this version")
    patch("apply", tree)
    words = [*MODEL, *flags, "--tensor-model-parallel-size", "2", "--ntp", "--ntp-degrees", "2,1"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    argv = [sys.executable, "-W", "ignore", "-c", ONE_OF_THREE, str(tree / script), *words]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=False)
    patch("revert", tree)
    assert done.returncode != 0
    assert "these flags cannot be combined with --ntp" in done.stderr, done.stderr[-3000:]
    assert named in done.stderr and "Traceback" not in done.stderr


INSTALL_TWICE = """
import sys
sys.argv = ["script", "--ntp"]
from megatron_ntp import install_from_argv
install_from_argv()  # imports megatron.training, whose hook calls it again
install_from_argv()
from megatron_ntp.integration.catalog import ROWS
from megatron_ntp.patching.rows import MARKER, function_of, resolve
for row in ROWS:
    found, depth = resolve(row).raw, 0
    function = function_of(found)
    while hasattr(function, "__wrapped__"):
        depth += MARKER in vars(function)
        function = function.__wrapped__
    if row.kind == "wrap":
        assert depth == 1, f"{row.target} is wrapped {depth} times"
"""


@pytest.mark.slow
def test_run_command_on_a_patched_checkout_installs_once(tree: Path) -> None:
    if flags_for(tree):
        pytest.skip("the run-time patches are not for this version")
    patch("apply", tree)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    argv = [sys.executable, "-W", "ignore", "-c", INSTALL_TWICE]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=250, check=False)
    patch("revert", tree)
    assert done.returncode == 0, done.stderr[-3000:]
