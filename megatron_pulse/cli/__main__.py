"""``python -m megatron_pulse.cli``: the same as ``pulse``."""

import sys

from megatron_pulse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
