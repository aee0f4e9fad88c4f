"""Whether anybody watches this rank, and who: the supervisor's beats, and injected faults.

Called where ranks start. It imports nothing, and does nothing, where nobody watches.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_ntp.environment import BEATS_ENV, EVENTS_ENV

_FAULT_FLAGS = ("--ntp-inject", "--ntp-config")  # a settings file may ask for faults, too

_begun = False
_watched = False


def begin(words: Sequence[str]) -> None:
    """As early as can be: says `start`, and arms faults. Further calls do nothing.

    Args:
        words: the flags of the training script.

    Raises:
        InjectError: --ntp-inject cannot be met.
        StartError: the record of this rank cannot be written.
    """
    global _begun
    has_faults = "--ntp" in words and any(word.startswith(_FAULT_FLAGS) for word in words)
    if _begun or not (has_faults or BEATS_ENV in os.environ):
        return
    from megatron_ntp.integration import progress

    if not progress.is_rank():
        return
    _begun = True
    if BEATS_ENV in os.environ:
        progress.report_beats()
        if EVENTS_ENV in os.environ:
            progress.report_events()
    if has_faults:
        from megatron_ntp.inject.firing import from_command_line

        injector = from_command_line(words, os.environ)
        if injector is not None:
            progress.listen(injector)


def watch() -> None:
    """Once this process can import Megatron: follows its loop, for whoever `begin` found."""
    global _watched
    if _begun and not _watched:
        from megatron_ntp.integration import progress

        _watched = True
        progress.watch()
