"""The versions of Megatron that tests run against, as parameters for pytest.

Always the installed one. More wheels of megatron-core, unpacked by ``make cores`` into
build/cores/VERSION, are used as they are found there; NTP_TEST_CHECKOUTS names folders of
Megatron-LM checkouts (separated by colons), whose own pretrain_gpt.py is then run, too.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_CORES = ROOT / "build" / "cores"


def _cores() -> list[Path]:
    return sorted(path.parent for path in _CORES.glob("*/megatron"))


def _checkouts() -> list[Path]:
    named = os.environ.get("NTP_TEST_CHECKOUTS", "")
    return [Path(path) for path in named.split(os.pathsep) if path]


CORES = [pytest.param(None, id="installed")] + [
    pytest.param(path, id=f"core-{path.name}") for path in _cores()
]

CHECKOUTS = [pytest.param(path, id=path.name) for path in _checkouts()] or [
    pytest.param(None, marks=pytest.mark.skip("NTP_TEST_CHECKOUTS names no Megatron-LM checkout"))
]
