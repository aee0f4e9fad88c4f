"""Steps over time of a job with its faults: what was useful, done again, and down.

matplotlib is optional (extra `plot`) and imported only here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ntp.plan.topology import format_degrees
from megatron_ntp.report.attempts import Attempt, Report

SIZE_INCH = (9.0, 4.5)
DPI = 150
STEPS, LOST, DOWN = "#0b5cad", "#c62828", "#fdeedd"


def draw(found: Report, path: Path) -> None:
    """Writes the picture; its suffix names the format. Raises ImportError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "no picture: matplotlib is not installed (pip install 'megatron-ntp[plot]')"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=SIZE_INCH, layout="constrained")
        for attempt in found.attempts:
            _draw_attempt(axes, attempt)
        axes.set_xlim(0, max(found.wall_s, 1.0))
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("seconds")
        axes.set_ylabel("steps completed")
        goodput = "" if found.goodput is None else f", goodput {found.goodput:.0%}"
        axes.set_title(
            f"{len(found.attempts)} attempts, {found.steps_lost} steps lost{goodput}", fontsize=11
        )
        figure.savefig(path, dpi=DPI)
        pyplot.close(figure)


def _draw_attempt(axes: Any, attempt: Attempt) -> None:
    """Its steps, those done again in another colour, and the time until the next one steps."""
    fault_s = attempt.fault_s if attempt.fault_s is not None else attempt.ended_s
    if fault_s is not None and attempt.down_s is not None:
        axes.axvspan(fault_s, fault_s + attempt.down_s, color=DOWN, linewidth=0, zorder=0)
    if not attempt.points:
        return
    times, steps = zip(*attempt.points, strict=True)
    axes.plot(times, steps, color=STEPS, marker="o", markersize=3, linewidth=1.4)
    if attempt.degrees:
        axes.annotate(
            format_degrees(attempt.degrees),
            attempt.points[0],
            xytext=(3, -10),
            textcoords="offset points",
            color=STEPS,
        )
    if fault_s is not None and attempt.reached is not None and attempt.down_s is not None:
        axes.plot(fault_s, attempt.reached, color=LOST, marker="x", markersize=7)
        if attempt.steps_lost:
            kept = attempt.reached - attempt.steps_lost
            axes.plot((fault_s, fault_s), (kept, attempt.reached), color=LOST, linewidth=1.4)
