"""What documents tell people to type is typed here.

Blocks marked ```sh run in order, in a folder with a copy of the installed Megatron as the checkout
`Megatron-LM`. Other blocks need a cluster or hours; their commands must at least exist.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ntp import cli
from megatron_ntp.patching import checkout as trees
from megatron_ntp.patching.versions import find_cores

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
TO_RUN = "sh"

if not find_cores():
    pytest.skip("needs megatron-core in this Python", allow_module_level=True)


def commands(path: Path, language: str) -> list[list[str]]:
    """Words of each command of the blocks of a language; lines that end in a backslash go on."""
    found = []
    for kind, text in BLOCK.findall(path.read_text()):
        if kind == language:
            lines = text.replace("\\\n", " ").splitlines()
            found += [words for line in lines if (words := shlex.split(line, comments=True))]
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed Megatron as a tree of its own."""
    tree = tmp_path_factory.mktemp("docs") / "Megatron-LM"
    skip = shutil.ignore_patterns("__pycache__", "*.so", "*.json")
    shutil.copytree(find_cores()[0] / "megatron", tree / "megatron", ignore=skip)
    shutil.copy(ROOT / "scripts" / "pretrain_gpt.py", tree)
    return tree


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if commands(path, TO_RUN)], ids=lambda path: path.stem
)
def test_commands_do_what_they_say(
    path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout.parent)
    monkeypatch.setattr(trees, "find_cores", list)  # a user of a checkout has no other core
    before = {p: p.read_bytes() for p in checkout.rglob("*.py")}
    for words in commands(path, TO_RUN):
        assert words[0] == "megatron-ntp", f"{words}: only our own commands are run here"
        if words[1] == "patches":  # imports Megatron, which is not for this process
            done = subprocess.run([sys.executable, "-m", "megatron_ntp", "patches"], check=False)
            status = done.returncode
        else:
            status = cli.main(words[1:])
        shown = capsys.readouterr()
        assert status == 0, f"{shlex.join(words)}: {shown.out}{shown.err}"
    assert {p: p.read_bytes() for p in checkout.rglob("*.py")} == before, "undone at the end"


def test_the_patch_is_shown_applied_and_reverted_in_the_document(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs = [words[2] for words in commands(ROOT / "docs/checkout.md", TO_RUN) if "patch" in words]
    assert verbs == ["check", "diff", "apply", "status", "revert"]
    monkeypatch.setattr(trees, "find_cores", list)
    hooked = checkout / "megatron" / "training" / "__init__.py"
    before = hooked.read_bytes()
    trees.apply(checkout)
    assert b"install_from_argv" in hooked.read_bytes()
    trees.revert(checkout)
    assert hooked.read_bytes() == before


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCUMENTS], ids=lambda path: path.stem)
def test_names_in_documents_exist(path: Path) -> None:
    """Commands of ours, and relative links."""
    text = path.read_text()
    for command in re.findall(r"(?:`|^ *)megatron-ntp ([a-z]+)\b", text, re.MULTILINE):
        assert command in cli.COMMANDS, f"{path.name} names megatron-ntp {command}"
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"
