"""Puts nonuniform TP into this process's Megatron, and takes it out again."""

from __future__ import annotations

from megatron_ntp.integration.catalog import ROWS
from megatron_ntp.patching.registry import Registry

_installed: Registry | None = None


def registry() -> Registry:
    """The catalog against the installed megatron-core."""
    from megatron.core import package_info

    return Registry("megatron", package_info.__version__, ROWS)


def install() -> Registry:
    """Applies every patch, or none: see `patching.registry`. A second call changes nothing."""
    global _installed
    if _installed is None:
        fresh = registry()
        fresh.apply()
        _installed = fresh
    return _installed


def uninstall() -> None:
    """Undoes `install` exactly."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
