"""Pickles are read without running anything, and torn ones are named as such."""

import argparse
import collections
import io
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Maker

from megatron_ntp.checkpoint.inert import Inert, kind_of, load_archive, load_pickle
from megatron_ntp.checkpoint.stored import read_stored
from megatron_ntp.errors import DamagedFileError


class Hostile:
    """Pickles as a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_call_in_a_pickle_is_not_made(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    data = pickle.dumps({"a": Hostile(f"touch {evidence}")})
    found = load_pickle(io.BytesIO(data), "it")
    assert not evidence.exists()
    assert isinstance(found["a"], Inert)
    assert kind_of(found["a"]).endswith("system")
    pickle.loads(data)
    assert evidence.exists(), "the pickle is not hostile, so nothing was shown"


def test_a_call_in_an_archive_is_not_made(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    torch.save({"a": Hostile(f"touch {evidence}")}, tmp_path / "it.pt")
    with open(tmp_path / "it.pt", "rb") as stream:
        load_archive(stream, "it.pt")
    assert not evidence.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "builtins.getattr", "subprocess.Popen", "importlib.import_module"]
)
def test_globals_are_stand_ins(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    found = load_pickle(io.BytesIO(f"c{module}\n{attribute}\n(S'1'\ntR.".encode()), "it")
    assert isinstance(found, Inert)
    assert kind_of(found) == name
    assert found.args == ("1",)


def test_plain_values_and_attributes_are_kept() -> None:
    ordered = collections.OrderedDict([("x", 1)])
    grouped = collections.defaultdict(list, {"y": [2]})
    value = {
        "args": argparse.Namespace(tp=2, name="a"),
        "ordered": ordered,
        "grouped": grouped,
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "size": torch.Size([3, 4]),
    }
    found = load_pickle(io.BytesIO(pickle.dumps(value)), "it")
    assert found["args"].fields == {"tp": 2, "name": "a"}
    assert found["ordered"] == {"x": 1}
    assert found["grouped"] == {"y": [2]}
    assert found["set"] == {1, 2}
    assert kind_of(found["dtype"]) == "torch.bfloat16"
    assert found["size"] == (3, 4)


def test_metadata_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1)
    whole = (path / ".metadata").read_bytes()
    for length in range(0, len(whole), 7):
        (path / ".metadata").write_bytes(whole[:length])
        with pytest.raises(DamagedFileError, match=r"\.metadata is not a whole pickle"):
            read_stored(path)


def test_an_archive_that_is_cut_anywhere_is_refused() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.ones(3), "b": argparse.Namespace(c=1)}, stream)
    whole = stream.getvalue()
    for length in range(0, len(whole), 31):
        with pytest.raises(DamagedFileError):
            load_archive(io.BytesIO(whole[:length]), "it")


def test_another_zip_file_is_refused() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", "b")
    with pytest.raises(DamagedFileError, match=r"it has no data\.pkl"):
        load_archive(stream, "it")


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1)
    for other in (3, {"a": 1}, None, argparse.Namespace(state_dict_metadata={})):
        (path / ".metadata").write_bytes(pickle.dumps(other))
        with pytest.raises(DamagedFileError, match="is not the metadata"):
            read_stored(path)


def test_shard_files_outside_the_folder_are_refused(tmp_path: Path) -> None:
    path = Maker(tmp_path).save(1)
    whole = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(whole.replace(b"__0_0.distcp", b"../outs.dist"))
    with pytest.raises(DamagedFileError, match="outside its folder"):
        read_stored(path)


def test_neither_torch_nor_megatron_is_imported(tmp_path: Path) -> None:
    Maker(tmp_path).save(1)
    code = (
        "import sys; from megatron_ntp.cli import main; "
        f"status = main(['checkpoint', 'verify', {str(tmp_path)!r}]); "
        "assert not {'torch', 'megatron', 'numpy'} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is whole" in done.stdout
