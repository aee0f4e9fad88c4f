"""`megatron-ntp launch`: one supervisor per node keeps a job running with the GPUs that are left.

    decide      pure: what nodes have left -> who runs where, or that nobody can
    guards      pure: when to start again, when to stop trying
    stall       pure: whether ranks hang
    training    what the training command says, and what is added to it
    state       RUN_DIR/JOBID: attempts, guards, locks
    health      the report of a node, and what turns bad while ranks run
    processes   ends what an attempt has started, all of it
    agent       torch.distributed.elastic's agent, tied to its supervisor
    warden      ends the attempt of a supervisor that was killed
    board       what supervisors tell each other: orders from node 0, status from all
    worker      every node: carries out orders
    attempt     every node: its agents, what its ranks say, their end
    desk        node 0: what it knows of the nodes, how it waits
    controller  node 0: the loop
    watch       node 0: one attempt, from its start to the reason of its end
    options, command  the command line

Nothing here imports megatron; only `agent` and `board` import torch.
"""
