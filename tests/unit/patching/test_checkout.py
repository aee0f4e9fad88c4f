"""The checkout patcher on small synthetic trees: every verb, every hostile tree."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ntp.patching import checkout as trees
from megatron_ntp.patching import files
from megatron_ntp.patching.cli import patch_main
from megatron_ntp.patching.hooks import Hook, State, load_hooks
from megatron_ntp.patching.rows import PatchError

INIT = b"""import os

from .args import parse
from .training import pretrain, get_model

from .utils import (one,
                    two)
"""

INFO = "MAJOR = 0\nMINOR = {minor}\nPATCH = 1\nPRE_RELEASE = {pre!r}\nraise RuntimeError\n"

ROOT = Path(__file__).resolve().parents[3]


def make_tree(root: Path, init: bytes = INIT, minor: int = 18, pre: str = "") -> Path:
    """Write a tree with the two files the patcher looks at, and some others."""
    (root / "megatron" / "core").mkdir(parents=True)
    (root / "megatron" / "training").mkdir()
    (root / "megatron" / "core" / "package_info.py").write_text(INFO.format(minor=minor, pre=pre))
    (root / "megatron" / "core" / "__init__.py").write_text("raise RuntimeError\n")
    (root / "megatron" / "training" / "__init__.py").write_bytes(init)
    (root / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    return root


def init_of(root: Path) -> Path:
    return root / "megatron" / "training" / "__init__.py"


def image(root: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a tree: mode and bytes, links as their target."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(root))] = (0, os.readlink(path).encode())
        elif path.is_file():
            found[str(path.relative_to(root))] = (path.stat().st_mode, path.read_bytes())
    return found


@pytest.fixture(autouse=True)
def no_other_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own Python may have megatron-core installed; only one test is about that."""
    monkeypatch.setattr(trees, "find_cores", list)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "Megatron-LM")


def patch(*argv: object) -> int:
    return patch_main([str(part) for part in argv])


# ---- the verbs ----------------------------------------------------------------------------------


def test_apply_status_revert(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = image(tree)
    assert patch("status", tree) == 0
    assert "megatron-core 0.18.1: not applied" in capsys.readouterr().out
    assert patch("check", tree) == 0
    assert "apply would succeed" in capsys.readouterr().out
    assert patch("apply", tree) == 0
    out = capsys.readouterr().out
    assert f"patched {init_of(tree)}" in out
    assert "patch revert" in out
    assert {k for k, v in image(tree).items() if before.get(k) != v} == {
        "megatron/training/__init__.py"
    }
    compile(init_of(tree).read_bytes(), "x", "exec")
    assert patch("status", tree) == 0
    assert ": applied" in capsys.readouterr().out
    assert patch("check", tree) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert patch("revert", tree) == 0
    assert image(tree) == before


def test_apply_and_revert_twice(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = image(tree)
    patch("apply", tree)
    applied, inode = image(tree), init_of(tree).stat().st_ino
    assert patch("apply", tree) == 0
    assert "already applied" in capsys.readouterr().out
    assert (image(tree), init_of(tree).stat().st_ino) == (applied, inode)
    patch("revert", tree)
    assert patch("revert", tree) == 0
    assert "not applied, nothing to change" in capsys.readouterr().out
    assert image(tree) == before


@pytest.mark.parametrize("init", [INIT, INIT.rstrip(b"\n"), INIT.replace(b"\n", b"\r\n")])
def test_diff_is_what_apply_does(tmp_path: Path, init: bytes, capfdbinary: Any) -> None:
    tree = make_tree(tmp_path / "t", init)
    before = image(tree)
    assert patch("diff", tree) == 0
    assert image(tree) == before
    text = capfdbinary.readouterr().out
    assert text.startswith(b"--- a/megatron/training/__init__.py")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=tree, input=text, check=True)
    by_git = init_of(tree).read_bytes()
    init_of(tree).write_bytes(init)
    patch("apply", tree)
    assert init_of(tree).read_bytes() == by_git
    capfdbinary.readouterr()
    assert patch("diff", tree) == 0
    assert capfdbinary.readouterr() == (b"", b"nothing to change\n")
    assert patch("diff", "--revert", tree) == 0
    text = capfdbinary.readouterr().out
    subprocess.run(["git", "apply", "--whitespace=nowarn"], cwd=tree, input=text, check=True)
    assert init_of(tree).read_bytes() == init


def test_usage(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["apply"], ["frobnicate", tree], ["apply", tmp_path / "nowhere"]):
        with pytest.raises(SystemExit) as stopped:
            patch(*argv)
        assert stopped.value.code == 2
    assert "is not a folder" in capsys.readouterr().err


# ---- which trees --------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["apply", "revert", "status", "check", "diff"])
def test_not_a_checkout(tree: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert patch(verb, tree / "megatron") == 1
    assert "Give the folder that holds pretrain_gpt.py" in capsys.readouterr().err


def test_installed_package_is_refused(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "megatron_core-0.18.1.dist-info").mkdir()
    assert patch("apply", tree) == 1
    assert "python -m megatron_ntp run" in capsys.readouterr().err


def test_version_without_numbers(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "megatron" / "core" / "package_info.py").write_text("MAJOR = 'x'\n")
    assert patch("apply", tree) == 1
    assert "no integer constant MAJOR, MINOR, PATCH" in capsys.readouterr().err


@pytest.mark.parametrize(("minor", "pre"), [(16, ""), (20, ""), (20, "rc1")])
def test_unknown_version(
    tmp_path: Path, minor: int, pre: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = make_tree(tmp_path / "t", minor=minor, pre=pre)
    before = image(tree)
    assert patch("apply", tree) == patch("check", tree) == 1
    text = "".join(capsys.readouterr())
    assert f"0.{minor}.1{pre} is not a version" in text
    assert ">=0.17,<0.20" in text
    assert "--force" in text
    assert image(tree) == before
    assert patch("apply", "--force", tree) == 0
    assert patch("status", tree) == 0
    assert patch("revert", tree) == 0
    assert image(tree) == before


def test_other_core(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    other = make_tree(tmp_path / "site", minor=19)
    monkeypatch.setattr(trees, "find_cores", lambda: [tree, other])
    before = image(tree)
    assert patch("apply", tree) == patch("check", tree) == 1
    text = "".join(capsys.readouterr())
    assert f"0.18.1 in {tree}" in text
    assert f"0.19.1 in {other}" in text
    assert image(tree) == before
    assert patch("diff", tree) == 1
    shown = capsys.readouterr()
    assert "+# >>> megatron-ntp" in shown.out
    assert "apply would refuse: two Megatrons" in shown.err
    assert patch("apply", "--allow-installed-core", tree) == 0
    assert patch("status", tree) == patch("revert", tree) == 0


def test_own_editable_installation_and_work_folder_are_no_other_core(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tree(tmp_path / "here")
    monkeypatch.chdir(other)
    monkeypatch.setattr(trees, "find_cores", lambda: [tree, other])
    assert patch("check", tree) == 0


def test_find_cores_sees_the_path_without_importing(tree: Path) -> None:
    code = (
        "import sys\nfrom megatron_ntp.patching.versions import find_cores\n"
        "print(find_cores()[0])\n"
        "print(any(n.startswith('megatron.') for n in sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [str(tree), "False"], done.stderr


# ---- people's own edits -------------------------------------------------------------------------


def test_dirty_file_keeps_the_edits(tree: Path) -> None:
    mine = b"# mine\n" + INIT + b"extra = 1\n"
    init_of(tree).write_bytes(mine)
    patch("apply", tree)
    assert mine in init_of(tree).read_bytes()
    init_of(tree).write_bytes(b"# more\n" + init_of(tree).read_bytes() + b"late = 2\n")
    assert patch("status", tree) == patch("apply", tree) == 0
    assert patch("revert", tree) == 0
    assert init_of(tree).read_bytes() == b"# more\n" + mine + b"late = 2\n"


@pytest.mark.parametrize(
    "init",
    [
        INIT.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + INIT,
        INIT.rstrip(b"\n"),
        INIT.replace(b"\n", b"\r\n").rstrip(b"\r\n"),
        INIT.replace(b"import os\n", b"import os\r\n"),
        b"# -*- coding: latin-1 -*-\n# \xe9\n" + INIT,
    ],
    ids=["crlf", "bom", "no-newline", "crlf-no-newline", "mixed", "latin-1"],
)
def test_bytes_are_kept(tmp_path: Path, init: bytes) -> None:
    tree = make_tree(tmp_path / "t", init)
    assert patch("apply", tree) == 0
    patched = init_of(tree).read_bytes()
    assert patched.startswith(init)
    if b"\r\n" in init and b"os\r\n\n" not in init:
        assert b"\n" not in patched.replace(b"\r\n", b"")
    assert patch("revert", tree) == 0
    assert init_of(tree).read_bytes() == init


def test_mode_is_kept(tree: Path) -> None:
    init_of(tree).chmod(0o750)
    patch("apply", tree)
    assert stat.S_IMODE(init_of(tree).stat().st_mode) == 0o750


def test_block_of_another_version_is_replaced_and_reverted(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (hook,) = load_hooks()
    older = Hook(**{**hook.__dict__, "lines": ("OLD = 1",)})
    monkeypatch.setattr(trees, "load_hooks", lambda: (older,))
    patch("apply", tree)
    monkeypatch.undo()
    monkeypatch.setattr(trees, "find_cores", list)
    old = init_of(tree).read_bytes()
    capsys.readouterr()
    assert patch("status", tree) == 1
    assert "applied by another version" in capsys.readouterr().out
    assert patch("apply", tree) == patch("status", tree) == 0
    assert b"OLD = 1" not in init_of(tree).read_bytes()
    init_of(tree).write_bytes(old)
    assert patch("revert", tree) == 0
    assert init_of(tree).read_bytes() == INIT


def test_block_edited_by_hand_needs_force(tree: Path, capsys: Any) -> None:
    patch("apply", tree)
    edited = init_of(tree).read_bytes().replace(b"    _install_ntp()", b"    mine()")
    init_of(tree).write_bytes(edited)
    assert patch("status", tree) == 1
    for verb in ("apply", "revert", "check"):
        assert patch(verb, tree) == 1
        assert "edited by hand between the markers" in "".join(capsys.readouterr())
        assert init_of(tree).read_bytes() == edited
    assert patch("revert", "--force", tree) == 0
    assert init_of(tree).read_bytes() == INIT


# ---- hostile trees ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "text"),
    [
        (INIT.replace(b"from .training import", b"from .start import"), "found 0 times"),
        (INIT + b"from .training import pretrain\n", "found 2 times (lines 4, 8)"),
        (b"", "found 0 times"),
        (b"<<<<<<< ours\n" + INIT, "is not valid Python"),
        (INIT + b'"""\nopen text\n', "is not valid Python"),
        (INIT + b"x = [\n", "is not valid Python"),
    ],
    ids=["moved", "twice", "empty", "conflict", "open-string", "open-bracket"],
)
def test_file_that_does_not_fit(tmp_path: Path, init: bytes, text: str, capsys: Any) -> None:
    tree = make_tree(tmp_path / "t", init)
    before = image(tree)
    assert patch("apply", "--force", tree) == patch("check", tree) == 1
    assert text in "".join(capsys.readouterr())
    assert patch("status", tree) == patch("revert", tree) == 0
    assert image(tree) == before


def test_half_applied_block(tree: Path, capsys: Any) -> None:
    patch("apply", tree)
    lines = init_of(tree).read_bytes().splitlines(keepends=True)
    init_of(tree).write_bytes(b"".join(lines[:-1]))
    before = image(tree)
    for verb in ("apply", "revert", "status", "check"):
        assert patch(verb, tree) == 1
        text = "".join(capsys.readouterr())
        assert "1 opening and 0 closing markers of startup-hook (line 8)" in text
        assert "Delete the lines" in text
    assert patch("revert", "--force", tree) == 1
    assert image(tree) == before


def test_missing_file(tree: Path, capsys: Any) -> None:
    init_of(tree).unlink()
    assert patch("apply", tree) == patch("status", tree) == 1
    assert "cannot be read: No such file" in "".join(capsys.readouterr())


def test_read_only_file(tree: Path, capsys: Any) -> None:
    init_of(tree).chmod(0o444)
    before = image(tree)
    assert patch("apply", tree) == patch("check", tree) == 1
    assert "is read-only (mode 0444)" in "".join(capsys.readouterr())
    assert image(tree) == before


def test_read_only_folder(tree: Path, capsys: Any) -> None:
    init_of(tree).parent.chmod(0o555)
    before = image(tree)
    assert patch("apply", tree) == patch("check", tree) == 1
    assert "is read-only (mode 0555)" in "".join(capsys.readouterr())
    assert image(tree) == before


def test_read_only_file_blocks_revert(tree: Path, capsys: Any) -> None:
    patch("apply", tree)
    init_of(tree).chmod(0o444)
    before = image(tree)
    assert patch("revert", tree) == 1
    assert "chmod u+w" in capsys.readouterr().err
    assert image(tree) == before


def test_read_only_file_system(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.os, "open", refuse)
    assert patch("apply", tree) == 1
    assert "Read-only file system. Nothing was changed" in capsys.readouterr().err


def test_link_inside_the_tree_is_followed_and_stays_a_link(tree: Path) -> None:
    real = tree / "megatron" / "real_init.py"
    init_of(tree).rename(real)
    init_of(tree).symlink_to("../real_init.py")
    before = image(tree)
    assert patch("apply", tree) == 0
    assert init_of(tree).is_symlink()
    assert b"megatron-ntp" in real.read_bytes()
    assert patch("revert", tree) == 0
    assert image(tree) == before


@pytest.mark.parametrize("what", ["file", "folder"])
def test_link_out_of_the_tree_is_refused(
    tree: Path, tmp_path: Path, what: str, capsys: Any
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    path = init_of(tree) if what == "file" else init_of(tree).parent
    path.rename(away / path.name)
    path.symlink_to(away / path.name)
    before = image(away)
    assert patch("apply", tree) == patch("status", tree) == 1
    assert str(away / path.name) in "".join(capsys.readouterr())
    assert image(away) == before


def test_linked_root_and_path_with_spaces(tmp_path: Path, capsys: Any) -> None:
    tree = make_tree(tmp_path / "my Megatron (copy)")
    (tmp_path / "link to it").symlink_to(tree)
    before = image(tree)
    assert patch("apply", tmp_path / "link to it") == 0
    assert "'" in capsys.readouterr().out.splitlines()[-1]
    assert patch("status", tree) == patch("revert", tree) == 0
    assert image(tree) == before


def test_hard_link_leaves_the_other_tree_alone(tree: Path, tmp_path: Path) -> None:
    os.link(init_of(tree), tmp_path / "other.py")
    patch("apply", tree)
    assert (tmp_path / "other.py").read_bytes() == INIT


def test_worktree(tmp_path: Path) -> None:
    main = make_tree(tmp_path / "main")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t"]
    for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *argv], cwd=main, check=True)
    subprocess.run([*git, "worktree", "add", "-q", "../side"], cwd=main, check=True)
    side = tmp_path / "side"

    def status() -> str:
        argv = ["git", "status", "--porcelain"]
        return subprocess.run(argv, cwd=side, capture_output=True, text=True, check=True).stdout

    assert patch("apply", side) == 0
    assert status() == " M megatron/training/__init__.py\n"
    assert init_of(main).read_bytes() == INIT
    assert patch("revert", side) == 0
    assert status() == ""


# ---- two runs at once, killed runs, full disks --------------------------------------------------


def test_second_run_is_refused_while_one_works(tree: Path, capsys: Any) -> None:
    with (tree / files.LOCK_NAME).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert patch("apply", tree) == 1
        assert "another `megatron-ntp patch` is working" in capsys.readouterr().err
        assert init_of(tree).read_bytes() == INIT
        assert patch("status", tree) == 0
    assert patch("apply", tree) == 0  # the file of a killed run means nothing
    assert not (tree / files.LOCK_NAME).exists()


def test_file_system_without_locks(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert patch("apply", tree) == 0


def test_many_runs_at_once_never_show_half_a_file(tree: Path) -> None:
    code = (
        "import sys; from megatron_ntp.patching import checkout as c; c.find_cores = list\n"
        "from megatron_ntp.patching.cli import patch_main\n"
        "for i in range(20): patch_main([['apply', 'revert'][i % 2], sys.argv[1]])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tree)],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    trees.apply(tree)
    whole = {INIT, init_of(tree).read_bytes()}
    while any(run.poll() is None for run in runs):
        assert init_of(tree).read_bytes() in whole
    for run in runs:
        assert "Traceback" not in (run.stderr.read() if run.stderr else "")
    patch("revert", tree)
    assert image(tree).keys() == image(make_tree(tree.parent / "fresh")).keys()
    assert init_of(tree).read_bytes() == INIT


def test_leftovers_of_a_killed_run_are_removed(tree: Path) -> None:
    before = image(tree)
    (init_of(tree).parent / ".megatron-ntp-abc").write_bytes(b"half")
    patch("apply", tree)
    patch("revert", tree)
    assert image(tree) == before


def test_file_changed_while_we_work(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = files._stage

    def slow(change: files.Change) -> Path:
        change.path.write_bytes(INIT + b"theirs = 1\n")
        return stage(change)

    monkeypatch.setattr(files, "_stage", slow)
    with pytest.raises(PatchError, match="changed by somebody else while this ran"):
        trees.apply(tree)
    assert init_of(tree).read_bytes() == INIT + b"theirs = 1\n"


@pytest.fixture
def two_files(tree: Path) -> Iterator[tuple[Path, tuple[Hook, ...]]]:
    """A tree and two hooks in two files."""
    (hook,) = load_hooks()
    fields = {**hook.__dict__, "name": "second", "file": "pretrain_gpt.py"}
    second = Hook(**{**fields, "anchor": "^from megatron", "place": "before"})
    yield tree, (hook, second)


def test_two_files_all_or_nothing(
    two_files: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tree, hooks = two_files
    monkeypatch.setattr(trees, "load_hooks", lambda: hooks)
    before = image(tree)
    replace, count = os.replace, iter(range(9))

    def failing(source: Any, target: Any) -> None:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", failing)
    assert patch("apply", tree) == 1
    assert "No space left on device. Nothing was changed" in capsys.readouterr().err
    assert image(tree) == before
    assert patch("apply", tree) == 0
    assert b"megatron-ntp" in (tree / "pretrain_gpt.py").read_bytes()
    assert patch("revert", tree) == 0
    assert image(tree) == before


def test_partly_applied_is_completed_or_reverted(
    two_files: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tree, hooks = two_files
    before = image(tree)
    for verb in ("apply", "revert"):
        monkeypatch.setattr(trees, "load_hooks", lambda: hooks[:1])
        patch("apply", tree)
        monkeypatch.setattr(trees, "load_hooks", lambda: hooks)
        capsys.readouterr()
        assert patch("status", tree) == 1
        assert ": partly applied" in capsys.readouterr().out
        assert patch(verb, tree) == patch("status", tree) == 0
        assert patch("revert", tree) == 0
    assert image(tree) == before


def test_one_bad_file_keeps_the_other_untouched(two_files: Any) -> None:
    tree, hooks = two_files
    (tree / "pretrain_gpt.py").write_text("pass\n")
    before = image(tree)
    with pytest.raises(PatchError, match="anchor of second was found 0 times"):
        trees.plan_apply(trees.inspect_checkout(tree, hooks))
    assert image(tree) == before


def test_states_of_a_checkout(two_files: Any) -> None:
    tree, hooks = two_files
    found = trees.inspect_checkout(tree, hooks)
    assert found.state == "not applied"
    assert {state.block.state for state in found.hooks} == {State.ABSENT}
