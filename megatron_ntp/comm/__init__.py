"""Tensors and process groups of nonuniform TP. Knows torch and plans, never Megatron."""
