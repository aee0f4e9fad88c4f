"""The picture of a rehearsal: both loss curves, the phases, the failure, and how far they differ.

matplotlib is optional (extra `plot`) and imported only here.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from megatron_ntp.rehearsal.parity import Parity
from megatron_ntp.rehearsal.story import Outcome

DPI = 150
SIZE_INCH = (9.0, 6.0)
UNIFORM, NTP, FAILURE = "#9aa5b1", "#0b5cad", "#c62828"
SHADES = {"healthy": "#e8f3ea", "reduced": "#fdeedd", "repaired": "#e8f3ea"}
FLOOR = 1e-9  # where equal losses are drawn on the logarithmic axis; its tick says so


class PlotMissingError(Exception):
    """matplotlib is not installed."""


def draw(outcome: Outcome, parity: Parity, path: Path) -> None:
    """Writes the PNG. Raises PlotMissingError where matplotlib is missing."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # Megatron turns INFO on for all
    try:
        import matplotlib
    except ImportError as error:
        raise PlotMissingError(
            "no picture: matplotlib is not installed (pip install 'megatron-ntp[plot]')"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (upper, lower) = pyplot.subplots(
            2, 1, figsize=SIZE_INCH, sharex=True, height_ratios=(3, 1), layout="constrained"
        )
        figure.suptitle("A job that loses a GPU, beside one that does not", fontsize=11)
        _draw_phases(upper, lower, outcome)
        _draw_losses(upper, outcome, parity)
        _draw_differences(lower, parity)
        temporary = path.with_suffix(".tmp.png")
        figure.savefig(temporary, dpi=DPI)
        pyplot.close(figure)
    temporary.replace(path)


def _draw_phases(upper: Any, lower: Any, outcome: Outcome) -> None:
    options = outcome.options
    reduced = " + ".join(f"TP{degree}" for degree in options.topology.dp_degrees)
    uniform = f"TP{options.nominal_tp} x DP{options.num_replicas}"
    spans = (
        ("healthy", uniform, 0.5, options.resumed_after + 0.5),
        ("reduced", reduced, options.resumed_after + 0.5, options.repaired_after + 0.5),
        ("repaired", uniform, options.repaired_after + 0.5, options.num_steps + 0.5),
    )
    for name, degrees, start, stop in spans:
        for axes in (upper, lower):
            axes.axvspan(start, stop, color=SHADES[name], linewidth=0, zorder=0)
        upper.text(
            (start + stop) / 2,
            1.01,
            f"{name}\n{degrees}",
            transform=upper.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9,
        )
    lower.set_xlim(0.5, options.num_steps + 0.5)


def _draw_losses(axes: Any, outcome: Outcome, parity: Parity) -> None:
    steps = [step.step for step in parity.steps]
    uniform = [step.uniform for step in parity.steps]
    ntp = [step.ntp for step in parity.steps]
    axes.plot(steps, uniform, color=UNIFORM, linewidth=5, label="undisturbed uniform job")
    axes.plot(steps, ntp, color=NTP, linewidth=1.2, marker="o", markersize=3.5, label="NTP job")
    lost = outcome.lost_losses
    if lost:
        axes.plot(
            list(lost),
            list(lost.values()),
            color=FAILURE,
            linestyle="none",
            marker="o",
            markersize=8,
            markerfacecolor="none",
            label="lost with the failure, done again",
        )
    _draw_failure(axes, outcome)
    axes.set_ylabel("loss")
    axes.legend(loc="lower left", frameon=False)


def _draw_failure(axes: Any, outcome: Outcome) -> None:
    """When the rank was killed, and the way back to the checkpoint."""
    options = outcome.options
    killed = outcome.killed_in_step - 0.5
    heights = axes.get_xaxis_transform()
    axes.axvline(killed, color=FAILURE, linewidth=1.2, linestyle="--")
    axes.annotate(
        "",
        (options.resumed_after + 0.5, 0.93),
        (killed, 0.93),
        xycoords=heights,
        textcoords=heights,
        arrowprops={"arrowstyle": "->", "color": FAILURE, "shrinkA": 0, "shrinkB": 0},
    )
    ranks = ", ".join(map(str, options.killed_ranks()))
    axes.annotate(
        f"SIGKILL to rank {ranks} in step {outcome.killed_in_step},\n"
        f"back to the checkpoint of step {options.resumed_after}",
        (killed, 0.93),
        xycoords=heights,
        xytext=(6, 0),
        textcoords="offset points",
        color=FAILURE,
        va="center",
    )


def _draw_differences(axes: Any, parity: Parity) -> None:
    steps = [step.step for step in parity.steps]
    values = [max(step.rel_diff, FLOOR) for step in parity.steps]
    colors = [NTP if step.rel_diff <= parity.tolerance else FAILURE for step in parity.steps]
    faces = [
        color if step.rel_diff else "white"
        for color, step in zip(colors, parity.steps, strict=True)
    ]
    axes.scatter(steps, values, c=faces, edgecolors=colors, s=16, zorder=3)
    if parity.tolerance > 0:
        axes.axhline(parity.tolerance, color=FAILURE, linewidth=1)
        axes.annotate(
            f"tolerance {parity.tolerance:g}",
            (1.0, parity.tolerance),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-3, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            color=FAILURE,
            fontsize=8,
        )
    axes.set_yscale("log")
    finite = [value for value in values if value < float("inf")]
    top = max([parity.tolerance * 5, FLOOR * 10, *(2 * value for value in finite)])
    axes.set_ylim(FLOOR / 3, top)
    decades = range(-8, math.floor(math.log10(top)) + 1, 2)
    labels = [f"$10^{{{power}}}$" for power in decades]
    axes.set_yticks([FLOOR, *(10.0**power for power in decades)], ["equal", *labels])
    axes.minorticks_off()
    axes.set_ylabel("relative\ndifference")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
