"""Blocks in the bytes of a file: line ends, markers, exact removal; and the shipped hook files."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.patching.hooks import (
    HOOKS_DIR,
    Hook,
    State,
    find_block,
    insert_block,
    load_hook,
    load_hooks,
    remove_block,
)
from megatron_ntp.patching.rows import PatchError

HOOK = Hook(
    name="test-hook",
    file="a.py",
    versions=">=0.17,<0.20",
    why="a test",
    drop_when="never",
    anchor=r"^ANCHOR\b",
    place="end",
    lines=("one = 1", "", "two = 2"),
)


def placed(place: str) -> Hook:
    return Hook(**{**HOOK.__dict__, "place": place})


TEXTS = st.lists(
    st.tuples(
        st.sampled_from([b"x = 1", b"", b"# text", b"\xc3\xa9", b"  y"]),
        st.sampled_from([b"\n", b"\r\n", b"\r"]),
    ),
    max_size=5,
).map(lambda parts: b"".join(line + eol for line, eol in parts))


@given(
    before=TEXTS,
    after=TEXTS,
    eol=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    cut=st.booleans(),
    bom=st.booleans(),
    place=st.sampled_from(["before", "after", "end"]),
)
def test_any_content_comes_back_to_the_byte(
    before: bytes, after: bytes, eol: bytes, cut: bool, bom: bool, place: str
) -> None:
    hook = placed(place)
    content = (b"\xef\xbb\xbf#\n" if bom else b"") + before + b"ANCHOR" + eol + after
    if cut:
        content = content.rstrip(b"\r\n")
    if content.endswith(b"\r"):
        content += b"#\n"
    patched = insert_block(content, hook)
    block = find_block(patched, hook)
    assert block.state is State.APPLIED
    assert remove_block(patched, block) == content


@pytest.mark.parametrize("eol", [b"\n", b"\r\n"])
def test_edits_around_the_block_survive(eol: bytes) -> None:
    patched = insert_block(b"ANCHOR" + eol + b"x" + eol, HOOK)
    edited = b"# mine" + eol + patched.replace(b"x", b"y") + b"z"
    assert remove_block(edited, find_block(edited, HOOK)) == (
        b"# mine" + eol + b"ANCHOR" + eol + b"y" + eol + b"z"
    )


def test_a_newline_added_by_an_editor_belongs_to_the_editor() -> None:
    patched = insert_block(b"ANCHOR\nx", HOOK)
    assert not patched.endswith(b"\n")
    assert remove_block(patched + b"\n", find_block(patched + b"\n", HOOK)) == b"ANCHOR\nx\n"


def test_line_ends_converted_after_apply() -> None:
    patched = insert_block(b"ANCHOR\nx\n", HOOK).replace(b"\n", b"\r\n")
    block = find_block(patched, HOOK)
    assert block.state is State.APPLIED
    assert remove_block(patched, block) == b"ANCHOR\r\nx\r\n"


def test_states() -> None:
    patched = insert_block(b"ANCHOR\n", HOOK)
    newer = Hook(**{**HOOK.__dict__, "lines": ("three = 3",)})
    assert find_block(b"ANCHOR\n", HOOK).state is State.ABSENT
    assert find_block(patched, newer).state is State.OUTDATED
    assert find_block(patched.replace(b"one", b"uno"), HOOK).state is State.EDITED
    lines = patched.splitlines(keepends=True)
    for damaged in (lines[:-1], lines[:1] + lines[2:], lines + lines[1:], lines[::-1]):
        block = find_block(b"".join(damaged), HOOK)
        assert block.state is State.BROKEN
        assert "markers of test-hook (line" in block.detail


def test_two_hooks_in_one_file() -> None:
    other = Hook(**{**HOOK.__dict__, "name": "other", "place": "after"})
    content = b"ANCHOR\nx\n"
    both = insert_block(insert_block(content, HOOK), other)
    once = remove_block(both, find_block(both, HOOK))
    assert find_block(once, HOOK).state is State.ABSENT
    assert remove_block(once, find_block(once, other)) == content


@pytest.mark.parametrize(("content", "count"), [(b"x\n", "0 times"), (b"ANCHOR\nANCHOR\n", "2 ")])
def test_anchor_must_be_there_once(content: bytes, count: str) -> None:
    with pytest.raises(PatchError, match=count):
        insert_block(content, HOOK)


# ---- the files in patches/ ----------------------------------------------------------------------


def test_shipped_hooks_are_described_and_listed() -> None:
    readme = (HOOKS_DIR / "README.md").read_text()
    hooks = load_hooks()
    assert [hook.name for hook in hooks] == ["startup-hook"]
    for hook in hooks:
        assert hook.why
        assert hook.drop_when
        assert f"{hook.name}.toml" in readme
        assert hook.file in readme
        assert max(map(len, hook.lines)) <= 100
    assert (HOOKS_DIR.parents[1] / "patches").resolve() == HOOKS_DIR


def run_hook(tmp_path: Path, *argv: str, plugin: str | None) -> subprocess.CompletedProcess[str]:
    """Run the inserted lines of the start-up hook as a script, with a stand-in plugin or none."""
    (hook,) = load_hooks()
    script = tmp_path / "script.py"
    tail = "import sys\nprint('went on', 'megatron_ntp' in sys.modules)\n"
    script.write_text("\n".join(hook.lines) + "\n" + tail)
    if plugin is not None:
        (tmp_path / "megatron_ntp.py").write_text(plugin)
    return subprocess.run(
        [sys.executable, "-I", "-c", f"""
import runpy, sys
sys.path.insert(0, {str(tmp_path)!r})
sys.argv[:] = [{str(script)!r}, *{argv!r}]
runpy.run_path({str(script)!r}, run_name="__main__")
"""],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


def test_hook_without_ntp_imports_nothing(tmp_path: Path) -> None:
    done = run_hook(tmp_path, "--tensor-model-parallel-size", "2", plugin="raise SystemExit(9)")
    assert (done.returncode, done.stdout.strip()) == (0, "went on False")


@pytest.mark.parametrize("flag", ["--ntp", "--ntp-degrees=2,1", "--ntp-config"])
def test_hook_with_ntp_installs(tmp_path: Path, flag: str) -> None:
    plugin = "def install_from_argv(): print('installed')\n"
    done = run_hook(tmp_path, "--lr", "1", flag, plugin=plugin)
    assert (done.returncode, done.stdout) == (0, "installed\nwent on True\n")


def test_hook_without_plugin_stops_only_with_ntp(tmp_path: Path) -> None:
    (tmp_path / "megatron_ntp.py").write_text("import no_such_module_of_ours\n")
    done = run_hook(tmp_path, "--ntp", plugin=None)
    assert done.returncode == 1
    assert "cannot import megatron_ntp (No module named 'no_such_module_of_ours')" in done.stderr
    assert "pip install megatron-ntp" in done.stderr
    assert run_hook(tmp_path, plugin=None).returncode == 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("why = ", "wy = "), "expected the keys"),
        (('place = "end"', 'place = "middle"'), "is not 'after', 'before' or 'end'"),
        (("[insert]", "[insert"), "cannot read the hook"),
    ],
)
def test_malformed_hook_file(tmp_path: Path, edit: tuple[str, str], message: str) -> None:
    text = (HOOKS_DIR / "startup-hook.toml").read_text().replace(*edit)
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(PatchError, match=message):
        load_hook(tmp_path / "bad.toml")


def test_empty_hook_folder(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="no hooks in"):
        load_hooks(tmp_path)
