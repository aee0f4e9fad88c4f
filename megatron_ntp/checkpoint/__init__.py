"""Checkpoints as files: what lies in a folder, whether it is whole, and who can load it.

Reads Megatron's folders without Megatron and without torch, so that a check costs milliseconds and
runs before a job starts. What a running job does with the answers is in `integration.loading`.
"""
