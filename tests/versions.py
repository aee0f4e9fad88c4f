"""The versions of Megatron that tests run against, as parameters for pytest.

`make cores` unpacks more wheels of megatron-core into build/cores/VERSION. Short tests run on every
version (EVERY_CORE), the others on the installed one, and with NTP_TEST_CORES=all (`make
test-versions`) on every one, too (CORES). NTP_TEST_CHECKOUTS names folders of Megatron-LM
checkouts (separated by colons), whose own pretrain_gpt.py is then run as well.
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


_WITH_ALL = os.environ.get("NTP_TEST_CORES") == "all"
_INSTALLED = pytest.param(None, id="installed")

OTHER_CORES = [pytest.param(path, id=f"core-{path.name}") for path in _cores()] or [
    pytest.param(None, marks=pytest.mark.skip("no other megatron-core: run `make cores`"))
]
EVERY_CORE = [_INSTALLED, *OTHER_CORES]
CORES = EVERY_CORE if _WITH_ALL else [_INSTALLED]

only_with_all_cores = pytest.mark.skipif(not _WITH_ALL, reason="`make test-versions` runs this")

CHECKOUTS = [pytest.param(path, id=path.name) for path in _checkouts()] or [
    pytest.param(None, marks=pytest.mark.skip("NTP_TEST_CHECKOUTS names no Megatron-LM checkout"))
]
