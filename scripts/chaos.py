"""Lets faults happen to a real training job, round by round, and looks whether it comes back.

    make chaos                                # 20 rounds, ten to twenty minutes on two cores
    make chaos ARGS="--seed 3 --rounds 5"

Each round trains a tiny GPT on CPU ranks through `megatron-ntp launch`, and meets one fault. It
passes if the job went on by itself, lost no more than the steps since its last complete checkpoint,
and ended where plain uniform Megatron ends to which nothing happened. Afterwards the time from a
SIGKILL to the next step is measured, beside that of plain Megatron under torchrun.

Needs a checkout of this repository: the job and the faults are in tests/chaos_kit. Status: 0 all
rounds passed, 1 one did not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "tests"):
    sys.path.insert(0, str(folder))
sys.path = [path for path in sys.path if Path(path) != ROOT / "scripts"]

from chaos_kit import restart  # noqa: E402
from chaos_kit.faults import draw  # noqa: E402
from chaos_kit.job import Reference  # noqa: E402
from chaos_kit.rounds import Round  # noqa: E402

from megatron_ntp.atomic import write_atomically  # noqa: E402
from megatron_ntp.rehearsal.processes import ENVIRONMENT  # noqa: E402

MOST_RATIO = 1.15
REFERENCE_DEADLINE_S = 600.0


def main() -> int:
    """Runs what was asked for, and keeps chaos.json up to date after each round."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _leave)  # or the round's supervisor would go on without us
    work, results = options.output / "chaos", options.output / "chaos.json"
    if options.only is None:
        shutil.rmtree(work, ignore_errors=True)
    faults = draw(options.seed, options.rounds)
    chosen = list(range(options.rounds)) if options.only is None else options.only
    found: dict[str, Any] = _earlier(results, options) if options.only is not None else {}
    found |= {"seed": options.seed, "rounds": found.get("rounds", {})}
    reference = _reference(work / "reference", options.plain_degrees)
    print(
        f"undisturbed plain Megatron at TP {', '.join(map(str, reference.degrees))}: "
        f"{reference.seconds:.0f} s, weights {reference.spread:.1e} apart",
        flush=True,
    )
    for number in chosen:
        folder = work / f"round-{number:02d}"
        shutil.rmtree(folder, ignore_errors=True)
        outcome = Round(faults[number], folder, reference, options.cold).run()
        found["rounds"][str(number)] = outcome
        print(line(number, options.rounds, outcome), flush=True)
        _write(results, found)
    if options.restarts:
        found["restart"] = _restarts(work, reference, options.restarts)
        _write(results, found)
    failed = [n for n, outcome in found["rounds"].items() if outcome["problems"]]
    slow = options.restarts and found["restart"]["ratio"] > MOST_RATIO
    print(
        f"{len(found['rounds']) - len(failed)} of {len(found['rounds'])} rounds passed; see "
        f"{results}",
        flush=True,
    )
    return 1 if failed or slow else 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--only",
        type=_numbers,
        metavar="N,N-N,...",
        help="only these rounds of the seed, counted from 0, beside what an earlier run has left",
    )
    parser.add_argument(
        "--plain-degrees",
        default="1,2,4",
        metavar="N,N,...",
        help="TP degrees of plain Megatron that tell how far weights may be apart; 1 and 2 must be "
        "among them (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "build", metavar="DIR")
    parser.add_argument(
        "--cold",
        action="store_true",
        help="every rank imports Megatron by itself, as in a real job; slower",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="how often restarts are timed, 0 for not at all (default: %(default)s)",
    )
    return parser


def _numbers(text: str) -> list[int]:
    """`3-5,8` -> 3, 4, 5, 8; empty: none."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _earlier(results: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What an earlier run of the same seed has found."""
    if not results.exists():
        return {}
    found: dict[str, Any] = json.loads(results.read_text())
    return found if found.get("seed") == options.seed else {}


def _reference(folder: Path, degrees: str) -> Reference:
    """Made once for all rounds; kept for later ones with --only."""
    started = time.monotonic()
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run(
            [sys.executable, "-m", "chaos_kit.reference", str(folder), degrees],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
            timeout=REFERENCE_DEADLINE_S,
            check=True,
        )
        complete.touch()
    return Reference.read(folder, time.monotonic() - started)


def line(number: int, num_rounds: int, outcome: dict[str, Any]) -> str:
    """One round for people."""
    head = f"round {number + 1:2d}/{num_rounds}  {outcome['fault']:<38}"
    if outcome["problems"]:
        return f"{head}FAILED ({outcome['detail']}): {'; '.join(outcome['problems'])}"
    return (
        f"{head}ok  {outcome['attempts']} attempts, lost {outcome['steps_lost']} of at most "
        f"{outcome['steps_allowed']} steps, loss {outcome['final_rel_diff']:.0e}, weights "
        f"{outcome['weights_spreads']:.2f} spreads, {outcome['seconds']:.0f} s"
    )


def _restarts(work: Path, reference: Reference, number: int) -> dict[str, Any]:
    """Alternately, so that a machine that grows slower does so for both."""
    ours, plain = [], []
    for each in ("ours", "plain"):
        for left in work.glob(f"restart-{each}-*"):
            shutil.rmtree(left)
    for count in range(number):
        plain.append(restart.plain(work / f"restart-plain-{count}", reference))
        ours.append(restart.ours(work / f"restart-ours-{count}", reference))
        print(f"SIGKILL to next step: plain {plain[-1]}, ours {ours[-1]}", flush=True)
    medians = [statistics.median(one["total_s"] for one in each) for each in (ours, plain)]
    ratio = round(medians[0] / medians[1], 3)
    print(
        f"SIGKILL to next step: {medians[0]:.1f} s, plain Megatron under torchrun "
        f"{medians[1]:.1f} s, ratio {ratio} (at most {MOST_RATIO})",
        flush=True,
    )
    return {"ours": ours, "plain": plain, "ratio": ratio, "at_most": MOST_RATIO}


def _write(path: Path, found: dict[str, Any]) -> None:
    rounds = dict(sorted(found["rounds"].items(), key=lambda item: int(item[0])))
    write_atomically(path, json.dumps({**found, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
