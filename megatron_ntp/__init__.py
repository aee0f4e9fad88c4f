"""Nonuniform tensor parallelism for Megatron: a job goes on when a replica loses a GPU."""

__version__ = "0.1.0"
