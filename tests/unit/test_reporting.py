"""What ranks print that end because another one has failed."""

from __future__ import annotations

import pytest

from megatron_ntp.errors import OtherRankFailedError
from megatron_ntp.reporting import report


def test_without_a_store_each_rank_says_what_it_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert report(OtherRankFailedError("x could not be saved by another rank"))
    told = "megatron-ntp: rank 1 stops: x could not be saved by another rank\n"
    assert capsys.readouterr().err == told
    assert not report(RuntimeError("Connection closed by peer"))  # its traceback is all there is
    assert capsys.readouterr().err == ""
