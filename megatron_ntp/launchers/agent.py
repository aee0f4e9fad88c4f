"""torchrun, except that it ends with the status of the rank that failed first.

    python -m megatron_ntp.launchers.agent TORCHRUN-ARGUMENTS

torchrun itself always ends with 1. A batch script has to tell 93 ("do not restart me") from a
crash; a rank that a signal ended gives 128 + the signal, as in a shell.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(argv: list[str]) -> int:
    """Run the ranks of one agent to their end."""
    # torchrun takes what is not among its words from there, and a rendezvous of a site's own would
    # put ranks in another order.
    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        print(f"rank {rank} (process {failure.pid}) failed first: it {how}", flush=True)
        return 128 - status if status < 0 else status
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
