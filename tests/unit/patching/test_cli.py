"""`megatron-ntp patches` with a stand-in catalog and a stand-in Megatron."""

import json
import sys
import types
from pathlib import Path

import pytest

from megatron_ntp.patching import cli
from megatron_ntp.patching.rows import Patch, RowStatus, Status

ROWS = (
    Patch("join", "posixpath:join", print, "to see the table", versions=">=0.17,<0.20"),
    Patch("old", "posixpath:gone", print, "was there before 0.17", versions="<0.17", optional=True),
)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    catalog = types.ModuleType(cli.CATALOG)
    catalog.ROWS = ROWS  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, cli.CATALOG, catalog)
    monkeypatch.setattr(cli, "find_cores", lambda: [Path("somewhere")])
    monkeypatch.setattr(cli, "read_core_version", lambda root: "0.18.2")
    return catalog


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.patches_main([]) == 0
    out = capsys.readouterr().out
    assert "megatron-core 0.18.2 in somewhere" in out
    assert "ok          >=0.17,<0.20  posixpath:join\n" in out
    assert "not needed  <0.17         posixpath:gone\n" in out
    assert "  to see the table\n" in out


def test_json_and_status(stand_ins: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Patch("gone", "posixpath:gone", print, "a test")
    stand_ins.ROWS = (*ROWS, gone)  # type: ignore[attr-defined]
    assert cli.patches_main(["--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == "0.18.2"
    assert [row["status"] for row in data["rows"]] == ["ok", "not needed", "missing"]
    assert data["rows"][2]["detail"] == "module posixpath has no 'gone'"


def test_no_megatron(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "find_cores", list)
    assert cli.patches_main([]) == 1
    assert "no megatron.core can be imported" in capsys.readouterr().err


def test_usage() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.patches_main(["--nonsense"])
    assert stopped.value.code == 2


def test_table_wraps_the_reason() -> None:
    patch = Patch("long", "module.name:attr", print, "word " * 40)
    lines = cli.catalog_table([RowStatus(patch, Status.CHANGED, "found (x)")], width=80)
    assert max(map(len, lines.splitlines())) <= 80
    assert "[found (x)]" in " ".join(lines.split())
