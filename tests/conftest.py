"""Which tests may run beside each other (`pytest -n`): those of different files."""

from __future__ import annotations

from typing import Any

import pytest

_ONE_MUNGED = "tests/slurm"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file share the jobs they look at; those of Slurm the one munged here.

    The marks that xdist has for this do nothing with pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _ONE_MUNGED if nodeid.startswith(_ONE_MUNGED) else nodeid.partition("::")[0]

    return ByFile(config, log)
