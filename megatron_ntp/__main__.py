"""``python -m megatron_ntp``, which is also what torchrun starts in each rank."""

import sys

from megatron_ntp.cli import main

if __name__ == "__main__":
    sys.exit(main())
