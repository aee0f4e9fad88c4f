"""Choices that a user has about loading. Values of flags, see `settings`."""

from __future__ import annotations

from enum import StrEnum


class LoadMode(StrEnum):
    """What to load, and what to do where there is nothing."""

    FULL = "full"
    MODEL_ONLY = "model-only"
    OR_SCRATCH = "or-scratch"


class CheckpointCheck(StrEnum):
    """How much of a checkpoint is read before it is trusted."""

    FILES = "files"
    CONTENT = "content"
