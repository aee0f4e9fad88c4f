"""Any one slot of 3 replicas of TP 4 may be dead: a sample of the 12 jobs, run.

All 12 by plan are in tests/unit/plan/test_topology.py.
"""

from __future__ import annotations

import jobs
import pytest
from jobs import DISTRIBUTED, LLAMA
from logical import distances, unequal


@pytest.mark.parametrize("replica_and_slot", ["0:0", "1:2"])
def test_one_dead_slot(replica_and_slot: str) -> None:
    replica, slot = map(int, replica_and_slot.split(":"))
    degrees = tuple(3 if each == replica else 4 for each in range(3))
    start = jobs.start(LLAMA, DISTRIBUTED)
    ours = jobs.nonuniform(
        LLAMA, degrees, DISTRIBUTED, failed=replica_and_slot, load=start, stop_at=3
    )
    plain = jobs.uniform(LLAMA, 1, 1, DISTRIBUTED, load=start, stop_at=3)
    topology = ours.ranks[0].plan.topology
    assert topology.failed == ((replica, slot),)
    assert slot not in topology.live_slots(replica, 0)
    # The reduced replica comes last in data-parallel order, whichever it is.
    assert [rank.tp_size for rank in ours.ranks] == [4] * 8 + [3] * 3
    assert max(distances(ours.grads(), plain.grads()).values()) <= 2e-6
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    for dp_rank in (1, 2):
        assert unequal(ours.weights(1, dp_rank), ours.weights(1)) == []
