"""Nonuniform tensor parallelism for Megatron: a job goes on when a replica loses a GPU."""

__version__ = "0.1.0"


def install_from_argv() -> None:
    """Installs nonuniform TP if this process was started with --ntp; else does nothing at all.

    A patched checkout and `megatron-ntp run` call it before Megatron's training code is used.
    """
    import sys

    if "--ntp" in sys.argv:
        from megatron_ntp.integration.install import install

        install()
