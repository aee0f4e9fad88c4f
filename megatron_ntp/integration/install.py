"""Puts nonuniform TP into this process's Megatron, and takes it out again."""

from __future__ import annotations

from megatron_ntp.errors import StartError
from megatron_ntp.integration.catalog import ROWS
from megatron_ntp.integration.one_megatron import require_one_megatron
from megatron_ntp.patching.registry import Registry

_installed: Registry | None = None


def registry() -> Registry:
    """The catalog against the installed megatron-core."""
    from megatron.core import package_info

    # Behind a plus sign Megatron adds the commit of whatever repository the process is started in.
    return Registry("megatron", package_info.__version__.partition("+")[0], ROWS)


def install() -> Registry:
    """Applies every patch, or none: see `patching.registry`. A second call changes nothing."""
    global _installed
    if _installed is None:
        # Set first: these import megatron.training, where a patched checkout calls install.
        _installed = registry()
        try:
            require_one_megatron()
            _installed.apply()
        except BaseException:
            _installed = None
            raise
    return _installed


def uninstall() -> None:
    """Undoes `install` exactly."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def verify_installed() -> None:
    """Looks again, now that the model is built, for code that does not lead through the patches.

    Called on every rank when its model is wrapped for data parallelism: by then the modules of a
    run are imported, and nothing has been trained.

    Raises:
        StartError: naming every such site; or a second Megatron that has come up since.
    """
    if _installed is None:
        return
    require_one_megatron()
    stale = _installed.verify()
    if stale:
        lines = [f"  {site.site} [{site.patch}]: {site.why}" for site in stale]
        raise StartError(
            "some names of Megatron do not lead through the patches of nonuniform TP, so this rank "
            "would train wrongly:\n" + "\n".join(lines) + "\nImport or wrap them before "
            "nonuniform TP is installed (start with `megatron-ntp run`), or not at all"
        )
