"""Changing somebody else's code: at run time by a registry, on disk by the checkout patcher.

`rows` describes a change as data, `bindings` finds every name an object is bound to, `registry`
applies a catalog and undoes it. `checkout` inserts a start-up hook into a Megatron-LM tree. The
registry is generic: nothing in this folder imports Megatron or torch.
"""

from megatron_ntp.patching.bindings import Difference, diff_snapshots, identity_snapshot
from megatron_ntp.patching.registry import Registry, StaleSite
from megatron_ntp.patching.rows import Expected, Patch, PatchError, RowStatus, Status

__all__ = [
    "Difference",
    "Expected",
    "Patch",
    "PatchError",
    "Registry",
    "RowStatus",
    "StaleSite",
    "Status",
    "diff_snapshots",
    "identity_snapshot",
]
