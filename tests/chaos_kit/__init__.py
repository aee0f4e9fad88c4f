"""What `scripts/chaos.py` and tests/chaos share: a small training job, faults, and judgement.

job         flags, the undisturbed jobs of plain Megatron, losses and weights
reference   runs those jobs (a process of its own: it imports Megatron once for all)
faults      which faults happen when, drawn from a seed
rounds      one round: start the supervisor, let the fault happen, judge what came of it
restart     time from SIGKILL to the next step, beside plain Megatron under torchrun
"""
