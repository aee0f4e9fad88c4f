"""Two rounds of `scripts/chaos.py`, and what they are drawn from. `make chaos` runs 20.

SIGKILL in a save; and a bit flipped in the newest checkpoint before a SIGKILL, which only the check
of content finds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_kit.faults import draw
from chaos_kit.rounds import Watched
from supervised import TRACKER

from megatron_ntp.inject.grammar import parse

ROOT = Path(__file__).resolve().parents[2]
SEED, ROUNDS = 7, (1, 6)
DEADLINE_S = 560.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_rounds(tmp_path: Path) -> None:
    """Status 0 only if every round has passed; here it is looked at again."""
    words = f"--seed {SEED} --only {','.join(map(str, ROUNDS))} --restarts 0 --plain-degrees 1,2"
    command = [sys.executable, "scripts/chaos.py", *words.split(), "--output", str(tmp_path)]
    chaos = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = chaos.communicate(timeout=DEADLINE_S)
    finally:
        chaos.terminate()  # it ends what it has started
        chaos.wait(30)
    assert chaos.returncode == 0, output
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert list(found["rounds"]) == list(map(str, ROUNDS))
    for number, outcome in found["rounds"].items():
        fault = draw(SEED, 20)[int(number)]
        assert (outcome["fault"], outcome["detail"]) == (fault.name, fault.detail)
        assert outcome["resumed"] is True and outcome["attempts"] == 2
        assert 0 <= outcome["steps_lost"] <= outcome["steps_allowed"]
        assert outcome["final_rel_diff"] <= 1e-5
        assert outcome["weights_spreads"] <= 3.0


def test_the_seed_draws_every_kind_and_the_same_again() -> None:
    faults = draw(SEED, 20)
    assert faults == draw(SEED, 20) != draw(SEED + 1, 20)
    assert len({fault.name for fault in faults[:14]}) == 14
    for fault in faults:
        assert bool(fault.inject) != bool(fault.outside)
        assert not fault.inject or parse(fault.inject)


def write(folder: Path, steps: list[int], tracker: int | None) -> None:
    lines = [json.dumps({"step": step, "losses": {"lm loss": 1.0}}) + "\n" for step in steps]
    (folder / "losses.jsonl").write_text("".join(lines))
    path = folder / "ckpt" / TRACKER
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if tracker is not None:
        path.write_text(f"{tracker}")


@pytest.mark.parametrize(("loses_newest", "allowed"), [(False, 3), (True, 7)])
def test_lost_steps_are_counted(tmp_path: Path, loses_newest: bool, allowed: int) -> None:
    watched = Watched(tmp_path, loses_newest)
    for last, tracker in ((3, 1), (5, 4), (9, 8), (11, None)):
        write(tmp_path, list(range(2, last + 1)), tracker)
        watched.look()
    assert (watched.last, watched.complete, watched.lost) == (11, [1, 4, 8], [])
    write(tmp_path, [*range(2, 12), 5, 6], None)
    watched.look()
    assert (watched.lost, watched.allowed, watched.last) == ([7], [allowed], 6)
