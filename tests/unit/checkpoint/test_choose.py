"""The newest whole checkpoint is taken, and whatever is passed over gets a reason."""

from pathlib import Path

import pytest
from checkpoints import SHARD, Maker, truncate

from megatron_ntp.checkpoint.choose import Choice, choose, told
from megatron_ntp.checkpoint.examine import Checkpoint
from megatron_ntp.checkpoint.folder import TRACKER, list_folder
from megatron_ntp.errors import CheckpointError


def pick(maker: Maker, step: int | None = None) -> Choice:
    return choose(list_folder(maker.path), step)


def name(choice: Choice) -> str | None:
    return choice.chosen.name if choice.chosen else None


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    made = Maker(tmp_path)
    for iteration in (5, 10, 20):
        made.save(iteration)
    return made


def test_the_newest(maker: Maker) -> None:
    found = pick(maker)
    assert name(found) == "iter_0000020"
    assert found.skipped == ()


def test_newest_by_number_not_by_name(tmp_path: Path) -> None:
    made = Maker(tmp_path)
    made.save(9_999_999)
    made.save(10_000_000)
    assert name(pick(made)) == "iter_10000000"


def test_a_torn_one_is_skipped_with_its_reason(maker: Maker) -> None:
    truncate(maker.path / "iter_0000020" / SHARD, 3)
    (maker.path / "iter_0000010" / "metadata.json").unlink()
    found = pick(maker)
    assert name(found) == "iter_0000005"
    assert [skip.name for skip in found.skipped] == ["iter_0000020", "iter_0000010"]
    assert SHARD in found.skipped[0].why
    assert "not completed" in found.skipped[1].why


def test_without_a_tracker(maker: Maker) -> None:
    (maker.path / TRACKER).unlink()
    assert name(pick(maker)) == "iter_0000020"


@pytest.mark.parametrize("text", ["", "x", "-3", "20 10", "\xff"])
def test_a_torn_tracker_is_told(maker: Maker, text: str) -> None:
    maker.track(text)
    found = pick(maker)
    assert name(found) == "iter_0000020"
    assert found.skipped[0].name == "tracker"
    assert "not an iteration" in found.skipped[0].why


def test_a_tracker_that_was_set_back_is_obeyed(maker: Maker) -> None:
    maker.track("10")
    found = pick(maker)
    assert name(found) == "iter_0000010"
    assert found.skipped[0].is_set_back
    assert "set back to iter_0000010" in found.skipped[0].why


def test_a_save_that_died_before_the_tracker_moved_counts(maker: Maker) -> None:
    maker.save(30, tracker=False)
    assert name(pick(maker)) == "iter_0000030"


def test_a_tracker_that_names_nothing_is_told(maker: Maker) -> None:
    maker.track("40")
    found = pick(maker)
    assert name(found) == "iter_0000020"
    assert found.skipped[0].name == "iter_0000040"
    assert "not there" in found.skipped[0].why


def test_one_that_was_asked_for(maker: Maker) -> None:
    assert name(pick(maker, step=10)) == "iter_0000010"


def test_one_that_was_asked_for_and_is_torn_is_not_replaced(maker: Maker) -> None:
    truncate(maker.path / "iter_0000010" / ".metadata", 3)
    with pytest.raises(CheckpointError, match=r"--ckpt-step 10 .* not a whole pickle"):
        pick(maker, step=10)


def test_one_that_was_asked_for_and_is_not_there(maker: Maker) -> None:
    with pytest.raises(CheckpointError, match=r"--ckpt-step 7 .* iter_0000020, iter_0000010"):
        pick(maker, step=7)


def test_a_release(tmp_path: Path) -> None:
    made = Maker(tmp_path)
    made.save(None)
    assert name(pick(made)) == "release"
    made.save(3)
    assert name(pick(made)) == "iter_0000003"
    truncate(tmp_path / "iter_0000003" / SHARD, 1)
    assert name(pick(made)) == "release"


def test_a_release_that_the_tracker_was_set_back_to(tmp_path: Path) -> None:
    made = Maker(tmp_path)
    made.save(None)
    made.save(3)
    made.track("release")
    assert name(pick(made)) == "release"


def test_content_is_asked_about_whole_ones_only(maker: Maker) -> None:
    truncate(maker.path / "iter_0000020" / SHARD, 3)
    asked = []

    def check(checkpoint: Checkpoint) -> list[str]:
        asked.append(checkpoint.name)
        return ["a bit is wrong"] if checkpoint.name == "iter_0000010" else []

    found = choose(list_folder(maker.path), check_content=check)
    assert asked == ["iter_0000010", "iter_0000005"]
    assert name(found) == "iter_0000005"
    assert str(found.skipped[1]) == "iter_0000010: a bit is wrong"


def test_nothing_whole(maker: Maker) -> None:
    for path in maker.path.glob("iter_*"):
        (path / ".metadata").unlink()
    found = pick(maker)
    assert found.chosen is None
    assert len(found.skipped) == 3
    assert found.folder.was_saved_to


def test_an_empty_and_a_missing_folder(tmp_path: Path) -> None:
    empty = list_folder(tmp_path)
    assert empty.exists
    assert not empty.was_saved_to
    assert choose(empty) == Choice(empty, None, ())
    missing = list_folder(tmp_path / "x")
    assert not missing.exists
    assert choose(missing).chosen is None


def test_folders_that_are_no_checkpoints_are_left_out(maker: Maker) -> None:
    for other in ("iter_12", "logs", "iter_0000099.tmp"):
        (maker.path / other).mkdir()
    (maker.path / "iter_0000098").write_text("a file")
    assert len(list_folder(maker.path).candidates) == 3


def test_a_file_and_a_checkpoint_are_no_folder_of_checkpoints(maker: Maker) -> None:
    with pytest.raises(CheckpointError, match="is a file"):
        list_folder(maker.path / TRACKER)
    with pytest.raises(CheckpointError, match=f"is one checkpoint.*give {maker.path}"):
        list_folder(maker.path / "iter_0000020")


def test_an_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read: Input/output error \(errno 5\)"):
        list_folder(tmp_path)


def test_many_problems_are_told_in_short() -> None:
    assert told(["a", "b", "c", "d", "e"]) == "a; b; c; and 2 more"
    assert told(["a"]) == "a"
