"""Where the ranks of a job first meet, through the rendezvous store and before any collective."""

from __future__ import annotations

import json
import os

import torch.distributed as dist

from megatron_ntp.comm.groups import check_in
from megatron_ntp.integration import context
from megatron_ntp.plan.spans import Span, check_spans, own_span


def meet(store: dist.Store, ntp: context.NTPContext) -> None:
    """Waits for all ranks: they hold the same plan, and lie on their nodes as it says.

    Raises:
        StartError: ranks are missing, or hold another plan.
        PlanTopologyError: nodes were counted in another order than the plan's.
    """
    assert ntp.plan is not None
    notes = check_in(
        store,
        ntp.global_rank,
        ntp.topology.world_size,
        ntp.plan.digest_entries(),
        ntp.settings.ntp_start_timeout,
        note=json.dumps(own_span(os.environ)),
    )
    spans = {Span(*said) for note in notes if (said := json.loads(note)) is not None}
    check_spans(ntp.topology, sorted(spans))
