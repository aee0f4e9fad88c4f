"""`megatron-ntp rehearse`: a small job on CPU loses a rank and carries on, for everybody to see.

The ranks are processes of their own that run `megatron-ntp run --cpu scripts/pretrain_gpt.py`, talk
over gloo, write real checkpoints and are killed with SIGKILL. `job` turns the options into
Megatron's flags, `processes` starts and ends ranks, `story` runs the phases, `parity` compares,
`report` and `plot` tell what came of it, and `command` is the command.
"""
