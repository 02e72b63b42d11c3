"""``pulse``, and ``python -m megatron_pulse.cli``."""

import sys

from megatron_pulse.processes import end_on_interrupt


def start() -> int:
    """Run one command; an interrupt during slow imports ends it with one line."""
    end_on_interrupt()
    from megatron_pulse.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(start())
