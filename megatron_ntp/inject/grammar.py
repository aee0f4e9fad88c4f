"""What `--ntp-inject` says: faults, each with its options and its moment.

    FAULTS  = FAULT ; FAULT ...
    FAULT   = KIND[:KEY=VALUE,KEY=VALUE...]@MOMENT
    MOMENT  = step=N | save | save=N | load | start

    kill:rank=3@step=7; hang:rank=1,after=0.2@save; corrupt-checkpoint:how=flip@save=8

Read once, on every rank, before anything is started.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from megatron_ntp.errors import PlanError


class InjectError(PlanError):
    """`--ntp-inject` asks for something that there is not."""


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    HANG = "hang"
    NVML_LOST = "nvml-lost"
    CORRUPT = "corrupt-checkpoint"


class How(StrEnum):
    """What becomes of the newest checkpoint."""

    TRUNCATE = "truncate"
    FLIP = "flip"
    NO_TRACKER = "no-tracker"


class When(StrEnum):
    """At which moments of a rank faults can happen."""

    START = "start"
    LOAD = "load"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True)
class Moment:
    """A moment. `at` is the step, or the step that is saved; None: whichever comes first."""

    when: When
    at: int | None = None

    def __str__(self) -> str:
        return self.when.value if self.at is None else f"{self.when.value}={self.at}"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        rank: global rank of the attempt that it happens in; None where `gpu` names it.
        gpu: device of the rank, as its node names it.
        after_s: seconds from the moment to the fault.
    """

    kind: Kind
    moment: Moment
    rank: int | None = None
    gpu: str | None = None
    host: str | None = None
    how: How | None = None
    after_s: float = 0.0

    def __str__(self) -> str:
        said = {
            "rank": self.rank,
            "gpu": self.gpu,
            "host": self.host,
            "how": self.how and self.how.value,
            "after": self.after_s or None,
        }
        options = ",".join(f"{key}={value}" for key, value in said.items() if value is not None)
        return f"{self.kind.value}:{options}@{self.moment}"


@dataclass(frozen=True)
class _Rules:
    """What a kind takes. One of `one_of` must be given; `defaults` are for what is left out."""

    keys: tuple[str, ...]
    one_of: tuple[str, ...] = ()
    moments: tuple[When, ...] = tuple(When)
    defaults: Mapping[str, Any] = field(default_factory=dict)


_RULES = {
    Kind.KILL: _Rules(("rank", "after"), one_of=("rank",)),
    Kind.HANG: _Rules(("rank", "after"), one_of=("rank",)),
    Kind.NVML_LOST: _Rules(("gpu", "host", "rank", "after"), one_of=("gpu", "rank")),
    Kind.CORRUPT: _Rules(
        ("how", "rank"),
        moments=(When.STEP, When.SAVE),
        defaults={"how": How.TRUNCATE, "rank": 0},
    ),
}


def parse(text: str) -> tuple[Fault, ...]:
    """The faults in the order they are written.

    Raises:
        InjectError: naming the fault, what is wrong with it, and what it could be.
    """
    words = [word.strip() for word in text.split(";")]
    faults = tuple(_fault(word) for word in words if word)
    if not faults:
        raise InjectError(f"--ntp-inject {text!r} names no fault, such as kill:rank=3@step=7")
    return faults


def _fault(text: str) -> Fault:
    where = f"--ntp-inject, fault {text!r}: "
    what, _, moment_text = text.rpartition("@")
    if not what:
        raise InjectError(f"{where}no moment. Add @step=N, @save, @save=N, @load or @start")
    kind_text, _, options_text = what.partition(":")
    kind = _one_of(Kind, kind_text.strip(), where, "kind")
    rules = _RULES[kind]
    moment = _moment(moment_text.strip(), where)
    if moment.when not in rules.moments:
        allowed = " or ".join(f"@{when.value}" for when in rules.moments)
        raise InjectError(
            f"{where}{kind.value} cannot happen at {moment.when.value}, but {allowed}"
        )
    options = {**rules.defaults, **_options(options_text, rules, where)}
    given = [key for key in rules.one_of if key in options]
    if rules.one_of and len(given) != 1:
        need = " or ".join(f"{key}=..." for key in rules.one_of)
        raise InjectError(f"{where}{'give only one of' if given else 'needs'} {need}")
    if "host" in options and "gpu" not in options:
        raise InjectError(f"{where}host belongs to gpu=..., a rank has its own host")
    return Fault(kind, moment, **options)


def _moment(text: str, where: str) -> Moment:
    name, equals, number = (part.strip() for part in text.partition("="))
    when = _one_of(When, name, where, "moment")
    if when is When.STEP and not equals:
        raise InjectError(f"{where}@step needs a number, such as @step=7")
    if when in (When.LOAD, When.START) and equals:
        raise InjectError(f"{where}@{when.value} takes no number")
    return Moment(when, _positive(number, f"{where}@{name}") if equals else None)


def _options(text: str, rules: _Rules, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in rules.keys:
            raise InjectError(f"{where}no key {key!r}. Known here: {', '.join(rules.keys)}")
        if not equals or not value:
            raise InjectError(f"{where}{key} has no value")
        field_name, convert = _KEYS[key]
        if field_name in found:
            raise InjectError(f"{where}{key} is given twice")
        found[field_name] = convert(value, where + key)
    return found


def _one_of[E: StrEnum](kinds: type[E], text: str, where: str, what: str) -> E:
    try:
        return kinds(text)
    except ValueError:
        known = ", ".join(kind.value for kind in kinds)
        raise InjectError(f"{where}no {what} {text!r}. There are: {known}") from None


def _positive(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise InjectError(f"{where} is {text!r}, expected a whole number from 1")
    return int(text)


def _rank(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise InjectError(f"{where} is {text!r}, expected a global rank, counted from 0")
    return int(text)


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InjectError(f"{where} is {text!r}, expected seconds")
    return seconds


def _how(text: str, where: str) -> How:
    return _one_of(How, text, where + ": ", "way")


def _text(text: str, where: str) -> str:
    return text


_KEYS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "rank": ("rank", _rank),
    "gpu": ("gpu", _text),
    "host": ("host", _text),
    "how": ("how", _how),
    "after": ("after_s", _seconds),
}
