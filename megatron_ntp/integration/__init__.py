"""The only place that knows Megatron: one file per hook point, one catalog of patches."""
