"""`megatron-ntp report`: a job's log of events as a table of attempts, and its goodput.

`attempts` is pure and says what is counted how; `command` prints; `plot` draws.
"""
