"""Starting a job on several nodes with what is left of each, without a supervisor.

    nodes    pure: slots of nodes -> replicas, ranks, devices; decided once, kept in a file
    check    what one node has to offer
    start    one node's part of the job: its torchrun, its devices, its signals and logs
    agent    torchrun that ends with the status of the rank that failed first
    rank     one rank: output to its own file, then the command
    slurm    writes a batch script around all of that
    command  `megatron-ntp nodes` and `megatron-ntp slurm`

A batch script calls them in turn: check on every node, place once, start on every node. Nothing
here imports megatron; only `agent` imports torch.
"""
