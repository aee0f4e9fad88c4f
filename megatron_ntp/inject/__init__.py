"""Faults on purpose: `--ntp-inject "kill:rank=3@step=7"` (docs/faults.md).

`grammar` reads what is to happen, `firing` does it in the rank it is meant for, and `log` keeps
across restarts what has happened. Imported only where the flag is given.
"""
