"""Python imports this as it starts where the folder is on PYTHONPATH. See chaos_kit.forking."""

import sys

if "megatron_ntp.supervisor.agent" in sys.orig_argv[:4]:
    from chaos_kit import forking

    forking.install()
