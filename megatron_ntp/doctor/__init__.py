"""`megatron-ntp doctor`: will this machine, this software, this Megatron and these flags work?

Every check is a function that returns findings; nothing is changed, and torch and Megatron are not
imported (versions come from package metadata, Megatron is read as source).

    findings   what a check says, as a table or JSON
    software   Python, torch, packages
    machine    driver, GPUs, shared memory
    megatron   the installed megatron-core, a checkout, the run-time patches
    job        flags after `--`
    command    the subcommand
"""
