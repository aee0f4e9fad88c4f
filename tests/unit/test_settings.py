"""Flags: the frozen list, settings files, what wins over what, and the tables in documents."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ntp import flags
from megatron_ntp.errors import SettingsFileError
from megatron_ntp.integration.refusals import REFUSALS
from megatron_ntp.settings import (
    COMMAND_LINE_ONLY,
    NTPSettings,
    add_arguments,
    config_path,
    declared_fields,
    flag_name,
    load_config,
)

Write = Callable[[str], Path]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "configs" / "settings").glob("*.yaml"))

# People's scripts, settings files and checkpoints hold these. Add to the list; change nothing.
FROZEN = {
    "--ntp": (False, None),
    "--ntp-config": (None, None),
    "--ntp-plan": (None, None),
    "--ntp-degrees": (None, None),
    "--ntp-failed": (None, None),
    "--ntp-batch-policy": (None, ("keep", "shrink", "redistribute")),
    "--ntp-bucket-size": (None, None),
    "--ntp-start-timeout": (300.0, None),
    "--ntp-stats-dir": (None, None),
    "--ntp-load": ("full", ("full", "model-only", "or-scratch")),
    "--ntp-checkpoint-check": ("files", ("files", "content")),
    "--ntp-power": ("off", ("off", "boost", "require")),
    "--ntp-power-nominal": (None, None),
    "--ntp-power-site": (None, None),
    "--ntp-power-socket": (None, None),
    "--ntp-power-command": (None, None),
    "--ntp-power-state-dir": (None, None),
    "--ntp-power-model": (None, None),
    "--ntp-power-target-gap": (0.01, None),
    "--ntp-power-deadline": (5.0, None),
    "--ntp-inject": (None, None),
    "--ntp-inject-state": (None, None),
}


def parse(*argv: object) -> argparse.Namespace:
    words = [str(word) for word in argv]
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False), words).parse_args(words)


@pytest.fixture
def config(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "ntp.yaml"
        path.write_text(text)
        return path

    return write


def test_the_list_of_flags_is_frozen() -> None:
    found = {
        flag_name(setting.name): (setting.default, setting.metadata["argument"].get("choices"))
        for setting in declared_fields()
    }
    assert {name: found.get(name) for name in FROZEN} == FROZEN
    assert set(found) == set(FROZEN), "a new flag belongs into this list"


def test_every_flag_is_described() -> None:
    for setting in declared_fields():
        assert setting.metadata["help"].endswith("."), setting.name
        assert setting.name.startswith("ntp")
        argument = setting.metadata["argument"]
        assert {"action", "metavar", "choices"} & set(argument), setting.name


def test_defaults_without_a_file() -> None:
    assert NTPSettings.from_namespace(parse()) == NTPSettings()


@pytest.mark.parametrize("spelling", [("--ntp-config", "{}"), ("--ntp-config={}",)])
def test_a_file_sets_what_the_command_line_does_not(
    config: Write, spelling: tuple[str, ...]
) -> None:
    path = config(
        "ntp-degrees: 8,8,7\nntp-bucket-size: 1000\nntp-start-timeout: 60\nntp-batch-policy: keep\n"
    )
    words = [word.format(path) for word in spelling]
    args = parse("--ntp", "--ntp-bucket-size", 7, *words)
    assert args.ntp_degrees == "8,8,7"
    assert args.ntp_batch_policy == "keep"
    assert args.ntp_start_timeout == 60.0 and isinstance(args.ntp_start_timeout, float)
    assert args.ntp_bucket_size == 7, "the command line wins"
    assert args.ntp_config == str(path)
    assert args.ntp_stats_dir is None, "the default stays"


def test_the_command_line_wins_even_with_the_default(config: Write) -> None:
    path = config("ntp-start-timeout: 60\n")
    args = parse("--ntp", "--ntp-config", path, "--ntp-start-timeout", "300")
    assert args.ntp_start_timeout == 300.0


def test_the_last_file_named_is_the_one() -> None:
    assert config_path(["--ntp-config", "a", "--ntp-config=b"]) == "b"
    assert config_path(["--ntp-config"]) is None
    assert config_path(["--ntp-configs", "a"]) is None


def test_yaml_does_not_interpret_values(config: Write) -> None:
    path = config("ntp-failed: 2:5\nntp-degrees: 8\nntp-stats-dir: no\n")
    assert load_config(path) == {"ntp_failed": "2:5", "ntp_degrees": "8", "ntp_stats_dir": "no"}


def test_an_empty_file_sets_nothing(config: Write) -> None:
    assert load_config(config("# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ntp-degres: 8,7\n", "no setting 'ntp-degres'. Did you mean ntp-degrees?"),
        ("ntp_degrees: 8,7\n", "Did you mean ntp-degrees?"),
        ("degrees: 8,7\n", "Did you mean ntp-degrees?"),
        ("--ntp-failed: 1:2\n", "Did you mean ntp-failed?"),
        ("learning-rate: 1\n", "Known keys: ntp, ntp-config, ntp-plan"),
        ("ntp: true\n", "ntp cannot be set in a file. Give --ntp on the command line"),
        ("ntp-config: other.yaml\n", "ntp-config cannot be set in a file"),
        ("ntp-bucket-size: many\n", "ntp-bucket-size is 'many', expected one int"),
        ("ntp-bucket-size: 1.5\n", "expected one int"),
        ("ntp-start-timeout: soon\n", "expected one float"),
        ("ntp-batch-policy: grow\n", "expected one of keep, shrink, redistribute"),
        ("ntp-degrees: [8, 7]\n", "Write one value, as on the command line"),
        ("ntp-failed: {2: 5}\n", "Write one value, as on the command line"),
        ("ntp-plan:\n", "ntp-plan has no value"),
        ("ntp-degrees: 8,7\nntp-degrees: 8,8\n", "ntp-degrees is set twice"),
        ("- ntp-degrees\n", "must hold lines of KEY: VALUE"),
        ("just text\n", "must hold lines of KEY: VALUE"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(config: Write, text: str, message: str) -> None:
    path = config(text)
    with pytest.raises(SettingsFileError) as caught:
        load_config(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(SettingsFileError, match=r"No such file.*all nodes"):
        parse("--ntp", "--ntp-config", tmp_path / "gone.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsFileError, match="is not YAML"):
        load_config(binary)


def test_values_are_plain(config: Write) -> None:
    path = config("ntp-degrees: 8,7\nntp-bucket-size: 5\n")
    args = parse("--ntp", "--ntp-config", path)
    for setting in declared_fields():
        value = getattr(args, setting.name)
        assert value is None or type(value) in (str, int, float, bool), setting.name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_load(path: Path) -> None:
    values = load_config(path)
    assert values and not set(values) & set(COMMAND_LINE_ONLY)
    plan = values.get("ntp_plan")
    assert plan is None or (ROOT / plan).is_file()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize(
    ("name", "marker"),
    [("README.md", "flags"), ("docs/flags.md", "flags"), ("docs/limits.md", "refused")],
)
def test_documents_hold_their_table(name: str, marker: str) -> None:
    text = (ROOT / name).read_text()
    assert flags.BEGIN.format(marker) in text
    assert flags.with_tables(text) == text, f"run: megatron-ntp flags --update {name}"


def test_every_refused_flag_is_in_the_table_with_its_reason() -> None:
    rows = flags.refused_table().splitlines()[2:]
    for refusal in REFUSALS:
        assert any(f"`{refusal.flag}`" in row and refusal.why in row for row in rows), refusal.flag


def test_flags_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flags.flags([]) == 0
    assert capsys.readouterr().out.strip() == flags.table()
    begin, end = flags.BEGIN.format("flags"), flags.END.format("flags")
    document = tmp_path / "doc.md"
    document.write_text(f"a\n{begin}\nold\n{end}\nb\n")
    assert flags.flags(["--update", str(document)]) == 0
    assert document.read_text() == f"a\n{begin}\n{flags.table()}\n{end}\nb\n"
    document.write_text("no markers")
    assert flags.flags(["--update", str(document)]) == 1
    assert "flags:begin" in capsys.readouterr().err
    assert document.read_text() == "no markers"
