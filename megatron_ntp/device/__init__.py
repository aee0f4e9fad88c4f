"""The GPUs of a node as devices: who they are, how they are, what they may draw.

Nothing here imports torch or megatron, and no call into NVML is ever made by a training process: a
process of its own makes it (nvml_process), so that a GPU that hangs every call costs a deadline
and not the job.

    errors         one map from NVML's codes to the faults that callers tell apart
    nvml           the calls themselves, in the process that imports it
    nvml_process   the same calls behind a deadline
    naming         UUIDs, and what CUDA_VISIBLE_DEVICES means
    site, budget   what a site allows, and what that leaves for each GPU
    state          limits as they were found, on disk, until they are restored
    keeper         the only writer of limits: bounds, records, restores
    serve, grants  the same for jobs without the right to write
    controller     how much power closes the gap
    model          what power buys
    session        what a training process sees of all this
    health         which GPUs can train
"""
