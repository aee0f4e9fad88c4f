"""The power curve: what power buys, fitted and kept on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ntp.device.model import (
    ModelFile,
    PowerCurve,
    PowerSample,
    fit_curve,
    reduction_gap,
)


def samples(exponent: float, *limits_w: int) -> list[PowerSample]:
    return [PowerSample(limit * 1000, 3.0 * limit**exponent) for limit in limits_w]


def test_published_numbers_of_8_to_7() -> None:
    curve, gap = PowerCurve(0.5), reduction_gap(8, 7)
    assert gap == 0.125
    assert curve.power_for(500, 1 / (1 - gap)) == pytest.approx(500 * (8 / 7) ** 2)  # 1.306 x
    # n/n' of power closes about half of the gap
    left = curve.gap_at(gap, 500, 500 * 8 / 7)
    assert left == pytest.approx(1 - 7 / 8 * (8 / 7) ** 0.5) and 0.45 < left / gap < 0.55


@given(exponent=st.floats(0.15, 0.95))
def test_fit_finds_the_exponent(exponent: float) -> None:
    curve = fit_curve(samples(exponent, 400, 450, 520, 600, 700))
    assert curve is not None
    assert curve.exponent == pytest.approx(exponent, abs=1e-6) and curve.num_samples == 5


def test_fit_needs_limits_that_differ() -> None:
    assert fit_curve(samples(0.5, 500, 500, 505, 510)) is None
    assert fit_curve(samples(0.5, 400, 700)) is None
    assert fit_curve([PowerSample(0, 1.0), *samples(0.5, 400, 700)]) is None


def test_fit_stays_in_a_sane_range() -> None:
    falling = fit_curve(samples(-0.5, 400, 500, 600))
    steep = fit_curve(samples(3.0, 400, 500, 600))
    assert falling is not None and falling.exponent == 0.1
    assert steep is not None and steep.exponent == 1.0


@given(gap=st.floats(0.01, 0.5), exponent=st.floats(0.2, 1), from_w=st.integers(300, 600))
def test_predictions_agree_with_each_other(gap: float, exponent: float, from_w: int) -> None:
    curve = PowerCurve(exponent)
    needed_w = curve.power_for(from_w, 1 / (1 - gap))
    assert curve.gap_at(gap, from_w, needed_w) == pytest.approx(0, abs=1e-9)
    assert curve.gap_at(gap, from_w, from_w) == pytest.approx(gap)


def test_file_keeps_the_newest_usable_fit_of_each_board(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    model = ModelFile.load(path)
    assert model.curve("H100").exponent == 0.5
    model.learn("H100", samples(0.4, 400, 500, 600))
    model.learn("B200", samples(0.6, 800, 900, 1000))
    model.save()
    again = ModelFile.load(path)
    assert again.curve("H100").exponent == pytest.approx(0.4)
    again.learn("H100", samples(0.9, 500, 500, 500))  # says nothing about power
    again.save()
    final = ModelFile.load(path)
    assert final.curve("H100").exponent == pytest.approx(0.4)
    assert final.curve("B200").exponent == pytest.approx(0.6)
    assert final.samples["H100"] == tuple(samples(0.4, 400, 500, 600))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"boards": {"H100": {"exponent": 7, "samples": []}}}', '{"boards": 3}']
)
def test_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "curves.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"curves\.json is damaged"):
        ModelFile.load(path)
