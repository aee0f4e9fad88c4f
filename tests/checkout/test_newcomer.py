"""A new user's first minutes: the README's commands, typed in an empty folder as they stand there.

The folder holds this project, and its Python is a virtual environment with what Megatron needs and
neither a Megatron nor this project. The checkout is what `git clone` brings: here a repository made
of the installed wheel and our script, and real ones where MEGATRON_LM_PATH names them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from megatron_ntp.patching.versions import find_cores, in_range, read_core_version

ROOT = Path(__file__).resolve().parents[2]
GIVEN = [Path(part) for part in os.environ.get("MEGATRON_LM_PATH", "").split(os.pathsep) if part]
TREES = [path for path in GIVEN if in_range(read_core_version(path), ">=0.17,<0.20")]
CLONED = "https://github.com/NVIDIA/Megatron-LM.git"
SECTION = "## Use it on your Megatron"
OF_OURS = ("megatron", "megatron_core", "megatron_ntp", "__editable__")

SOURCES = [
    pytest.param(None, id="wheel"),
    *[pytest.param(path, id=path.name) for path in TREES],
]
if not TREES:
    reason = "set MEGATRON_LM_PATH to a Megatron-LM checkout of core 0.17 to 0.19"
    SOURCES.append(pytest.param(None, id="checkout", marks=pytest.mark.skip(reason)))

pytestmark = pytest.mark.slow


def shell_blocks(path: Path, section: str = "") -> str:
    """The blocks of a document, or of one section of it, that are marked as shell commands."""
    text = path.read_text()
    if section:
        text = text.partition(f"{section}\n")[2].partition("\n## ")[0]
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def make_repository(source: Path | None, folder: Path, tag: str) -> None:
    """What is cloned: one commit with a tag."""
    skip = shutil.ignore_patterns(".git", "__pycache__")
    if source is None:  # a wheel brings built dataset helpers, a checkout builds its own
        shutil.copytree(find_cores()[0] / "megatron", folder / "megatron", ignore=skip)
        shutil.copy(ROOT / "scripts" / "pretrain_gpt.py", folder)
    else:
        shutil.copytree(source, folder, ignore=skip, symlinks=True)
    (folder / ".gitignore").write_text("__pycache__/\n*.so\n")
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force", ".")
    git(folder, "commit", "--quiet", "--message", "All")
    git(folder, "tag", tag)


def make_environment(folder: Path) -> None:
    """A virtual environment with this one's packages, except Megatron and ourselves."""
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True)
    packages = Path(sysconfig.get_path("purelib"))
    target = next(folder.glob("lib/python*/site-packages"))
    for entry in packages.iterdir():
        if not entry.name.lower().startswith(OF_OURS):
            (target / entry.name).symlink_to(entry)
    for name in ("pip", "torchrun"):
        module = {"pip": "pip", "torchrun": "torch.distributed.run"}[name]
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{folder}/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python") / "env"
    make_environment(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("source", SOURCES)
def test_the_readme_as_written(source: Path | None, environment: Path, tmp_path: Path) -> None:
    script = shell_blocks(ROOT / "README.md", SECTION)
    for step in ("git clone", "pip install", "doctor", "diff", "apply", "torchrun", "revert"):
        assert step in script
    tag = re.findall(r"--branch (\S+)", script)[0]
    make_repository(source, tmp_path / "upstream", tag)
    home = tmp_path / "empty"
    home.mkdir()
    skip = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, home / "megatron-ntp", ignore=skip, symlinks=True)

    done = type_in(script, home, environment, tmp_path / "upstream")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"iteration +(\d+)/ +2 .*?lm loss: (\S+)", done.stdout)
    assert [step for step, _ in losses] == ["1", "2"], done.stdout
    assert "+++ b/megatron/training/__init__.py" in done.stdout, "the diff"
    assert "nonuniform TP plan" in done.stdout
    assert "reverted" in done.stdout
    changed = ["git", "-C", str(home / "Megatron-LM"), "status", "--porcelain"]
    assert subprocess.run(changed, check=True, capture_output=True).stdout == b""


def type_in(
    script: str, folder: Path, environment: Path, upstream: Path
) -> subprocess.CompletedProcess[str]:
    """Run by a shell that stops at the first error; the clone comes from `upstream`."""
    kept = {name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_"))}
    environ = {
        **kept,
        "HOME": os.environ["HOME"],  # pip may be told there where packages are
        "PATH": f"{environment / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{upstream}.insteadOf",
        "GIT_CONFIG_VALUE_0": CLONED,
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
