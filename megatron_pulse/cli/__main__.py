"""``pulse``, and ``python -m megatron_pulse.cli``."""

import sys


def start() -> int:
    """Run one command; an interrupt during slow imports also ends it quietly."""
    try:
        from megatron_pulse.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("\npulse: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())
