"""Small throw-away packages on disk, imported for one test and forgotten afterwards."""

import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_NUMBER = itertools.count()

MakePackage = Callable[..., str]


@pytest.fixture
def make_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePackage]:
    """Returns make(files): write modules (PKG in a text is the package's name), return the name."""
    names: list[str] = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(**files: str) -> str:
        name = f"throwaway_{next(_NUMBER)}"
        names.append(name)
        folder = tmp_path / name
        folder.mkdir()
        for stem, text in {"__init__": "", **files}.items():
            source = textwrap.dedent(text).replace("PKG", name)
            (folder / f"{stem}.py").write_text(source, encoding="utf-8")
        return name

    yield make
    for module in list(sys.modules):
        if module.partition(".")[0] in names:
            del sys.modules[module]
