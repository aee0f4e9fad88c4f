"""Nonuniform tensor parallelism for Megatron: a job goes on when a replica loses a GPU."""

__version__ = "0.1.0"


def install_from_argv() -> None:
    """Installs nonuniform TP if this process was started with --ntp; else does nothing at all.

    A patched checkout and `megatron-ntp run` call it before Megatron's training code is used.

    Raises:
        UnsupportedFlagError: --ntp-... flags were given without --ntp.
        StartError: this process's Megatron is not one that nonuniform TP can be put into.
    """
    import sys

    flags = [word for word in sys.argv[1:] if word == "--ntp" or word.startswith("--ntp-")]
    if flags:
        from megatron_ntp.reporting import install_excepthook

        install_excepthook()
        _check_switch(flags)
        from megatron_ntp.integration.install import install

        install()


def _check_switch(flags: list[str]) -> None:
    """Megatron's own parser would only say that it does not know the other flags."""
    if "--ntp" not in flags:
        from megatron_ntp.errors import UnsupportedFlagError

        raise UnsupportedFlagError(
            f"{', '.join(flags)} without --ntp: nonuniform tensor parallelism is off. Add --ntp, "
            "or remove what belongs to it"
        )
