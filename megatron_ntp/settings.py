"""Every setting of nonuniform TP, declared once: flags, files, messages and tables follow from it.

A field `ntp_degrees` is the flag `--ntp-degrees` and the key `ntp-degrees` of a settings file.
Values are plain strings and numbers, so that they can be kept in a checkpoint's arguments.

[File before flags] A file's values become the parser's defaults. So what is on the command line
wins, a file can be told from a default nowhere else, and the values are Megatron arguments like
any others: printed at start, and saved with checkpoints.

[Text only] Values of a file are read as text and converted as on the command line. YAML's own
rules would turn `ntp-failed: 2:5` into the number 125.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from megatron_ntp.checkpoint.modes import CheckpointCheck, LoadMode
from megatron_ntp.device.settings import PowerSettings
from megatron_ntp.errors import SettingsFileError
from megatron_ntp.plan.batch import BatchPolicy

GROUP_TITLE = "nonuniform tensor parallelism"
DEFAULT_START_TIMEOUT_S = 300.0


def _setting(default: Any, help_text: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "argument": argument})


@dataclass(frozen=True)
class NTPSettings:
    """Settings of one run. Every rank of a job must be given the same ones."""

    ntp: bool = _setting(
        False,
        "Turn nonuniform tensor parallelism on. Without it Megatron is untouched.",
        action="store_true",
    )
    ntp_config: str | None = _setting(
        None,
        "Settings file (YAML): these flags without their two dashes as keys. What is on the "
        "command line wins.",
        metavar="FILE",
    )
    ntp_plan: str | None = _setting(
        None,
        "Plan file (JSON, see `megatron-ntp plan`); instead of --ntp-degrees and --ntp-failed.",
        metavar="FILE",
    )
    ntp_degrees: str | None = _setting(
        None,
        "Tensor-parallel degree of each replica, e.g. 8,8,7; --tensor-model-parallel-size stays "
        "the healthy degree.",
        metavar="N,N,...",
    )
    ntp_failed: str | None = _setting(
        None,
        "Failed GPUs as REPLICA:SLOT, e.g. 2:5; degrees follow from it.",
        metavar="REPLICA:SLOT[,...]",
    )
    ntp_batch_policy: str | None = _setting(
        None,
        "Microbatches of a reduced replica: keep (as many as the others, the default), shrink "
        "(fewer, the global batch shrinks) or redistribute (fewer, the others take them over).",
        choices=tuple(policy.value for policy in BatchPolicy),
    )
    ntp_bucket_size: int | None = _setting(
        None,
        "Parameters of the full model per reshard exchange; default: as large as Megatron's own "
        "gradient buckets.",
        type=int,
        metavar="NUMEL",
    )
    ntp_start_timeout: float = _setting(
        DEFAULT_START_TIMEOUT_S,
        "Seconds to wait at start-up for all ranks before the missing ones are named.",
        type=float,
        metavar="SECONDS",
    )
    ntp_stats_dir: str | None = _setting(
        None,
        "Write one JSON file per rank with exchanges, bytes and optimizer state there.",
        metavar="DIR",
    )

    ntp_load: str = _setting(
        LoadMode.FULL.value,
        "What to load with --load: full, model-only (go on without the optimizer's moments, once: "
        "what is saved afterwards is loaded in full) or or-scratch (start from new weights where "
        "there is no whole checkpoint).",
        choices=tuple(mode.value for mode in LoadMode),
    )
    ntp_checkpoint_check: str = _setting(
        CheckpointCheck.FILES.value,
        "Before a checkpoint is loaded: look at names and sizes of its files, or at their content "
        "too (all ranks together read it once).",
        choices=tuple(check.value for check in CheckpointCheck),
    )

    @classmethod
    def from_namespace(cls, args: argparse.Namespace) -> NTPSettings:
        """The settings among Megatron's parsed arguments."""
        values: dict[str, Any] = {f.name: getattr(args, f.name, f.default) for f in fields(cls)}
        return cls(**values)


@dataclass(frozen=True)
class InjectSettings:
    """Faults on purpose, to see that a job comes back (docs/faults.md)."""

    ntp_inject: str | None = _setting(
        None,
        'Let faults happen, each once per job, e.g. "kill:rank=3@step=7; hang:rank=1@save" '
        "(docs/faults.md).",
        metavar="FAULTS",
    )
    ntp_inject_state: str | None = _setting(
        None,
        "Where --ntp-inject remembers what has happened; default: the run folder of `megatron-ntp "
        "launch`.",
        metavar="DIR",
    )


DECLARED: tuple[type, ...] = (NTPSettings, PowerSettings, InjectSettings)
"""Dataclasses whose fields are flags, in the order of tables. Their metadata is that of above."""

COMMAND_LINE_ONLY = ("ntp", "ntp_config")
"""Fields that no file may set: the switch is read before there is a parser."""


def declared_fields() -> Iterator[Field[Any]]:
    """Every setting of every declared dataclass."""
    for cls in DECLARED:
        yield from fields(cls)


def flag_name(field_name: str) -> str:
    """`ntp_degrees` -> `--ntp-degrees`."""
    return "--" + file_key(field_name)


def file_key(field_name: str) -> str:
    """`ntp_degrees` -> `ntp-degrees`."""
    return field_name.replace("_", "-")


def add_arguments(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """Adds the flags to a parser, in a group of their own.

    Args:
        parser: Which parser. Megatron's, on every rank.
        argv: The words it will parse; its --ntp-config is read here. Default: this process's own.

    Raises:
        SettingsFileError: the file of --ntp-config cannot be used.
    """
    path = config_path(sys.argv[1:] if argv is None else argv)
    defaults = {} if path is None else load_config(path)
    group = parser.add_argument_group(GROUP_TITLE)
    for setting in declared_fields():
        group.add_argument(
            flag_name(setting.name),
            default=defaults.get(setting.name, setting.default),  # see [File before flags]
            help=setting.metadata["help"],
            **setting.metadata["argument"],
        )
    return parser


# Settings files


def config_path(argv: Sequence[str]) -> str | None:
    """The file that --ntp-config names among these words, if any."""
    flag = flag_name("ntp_config")
    path = None
    for place, word in enumerate(argv):
        if word == flag and place + 1 < len(argv):
            path = argv[place + 1]
        elif word.startswith(flag + "="):
            path = word.partition("=")[2]
    return path


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Values by field name, converted and checked.

    Raises:
        SettingsFileError: naming the file, the key and the cure.
    """
    known = {file_key(setting.name): setting for setting in declared_fields()}
    values: dict[str, Any] = {}
    for key, value in _read_mapping(path):
        where = f"settings file {os.fspath(path)}: "
        if key not in known:
            raise SettingsFileError(where + _unknown(key, list(known)))
        setting = known[key]
        if setting.name in COMMAND_LINE_ONLY:
            raise SettingsFileError(
                f"{where}{key} cannot be set in a file. Give --{key} on the command line"
            )
        if setting.name in values:
            raise SettingsFileError(f"{where}{key} is set twice. Keep one of the two")
        values[setting.name] = _convert(where + key, setting, value)
    return values


def _read_mapping(path: str | os.PathLike[str]) -> list[tuple[str, Any]]:
    """Keys and values in order, twofold keys included; values are text where they are scalars."""
    import yaml

    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            node = yaml.compose(file, Loader=yaml.BaseLoader)
    except OSError as error:
        raise SettingsFileError(
            f"settings file {name} (--ntp-config) cannot be read: {error.strerror}. Every rank "
            "reads it: it must lie where all nodes see it"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsFileError(f"settings file {name} is not YAML: {error}") from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise SettingsFileError(
            f"settings file {name} must hold lines of KEY: VALUE, such as ntp-degrees: 8,8,7"
        )
    return [
        (
            str(key.value),
            value.value if isinstance(value, yaml.ScalarNode) else None,
        )
        for key, value in node.value
    ]


def _unknown(key: str, known: Sequence[str]) -> str:
    guess = key.strip().lstrip("-").replace("_", "-")
    guesses = (guess, "ntp-" + guess)
    near = next((name for name in guesses if name in known), None) or next(
        (match for name in guesses for match in difflib.get_close_matches(name, known, 1, 0.75)),
        None,
    )
    hint = f"Did you mean {near}?" if near else f"Known keys: {', '.join(known)}"
    return f"there is no setting {key!r}. {hint}"


def _convert(where: str, setting: Field[Any], text: str | None) -> Any:
    """A file's value as the flag would give it."""
    argument = setting.metadata["argument"]
    if text is None:
        raise SettingsFileError(
            f"{where} is a list or a mapping. Write one value, as on the command line"
        )
    if text == "":
        raise SettingsFileError(f"{where} has no value. Give one, or remove the line")
    if argument.get("action") == "store_true":
        if text not in ("true", "false"):
            raise SettingsFileError(f"{where} is {text!r}, expected true or false")
        return text == "true"
    try:
        value = argument.get("type", str)(text)
    except ValueError as error:
        kind = argument["type"].__name__
        raise SettingsFileError(f"{where} is {text!r}, expected one {kind}") from error
    choices = argument.get("choices")
    if choices is not None and value not in choices:
        raise SettingsFileError(f"{where} is {text!r}, expected one of {', '.join(choices)}")
    return value
