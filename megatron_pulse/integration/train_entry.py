"""Start of a rank that trains: the module that launchers run.

torchrun --nproc-per-node 4 -m megatron_pulse.integration.train_entry --pulse-backbone ...
"""

import os
import signal
import warnings

from megatron_pulse.integration.flags.recipe_keys import name_keys_in_output
from megatron_pulse.processes import end_with_parent, open_closed_streams, without_collecting
from megatron_pulse.runtime.stop_signals import STOP


def start() -> None:
    """Train by the flags of ``sys.argv``, and end the process."""
    warnings.filterwarnings("ignore")
    open_closed_streams()
    name_keys_in_output()
    STOP.listen()  # before the slow imports, so that an early stop signal is reported
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # without torchrun there is no parent to follow
    with without_collecting():
        from megatron_pulse.integration.megatron import compat

        compat.install()  # before anything imports Megatron
        from megatron_pulse.integration.pretrain import main
    main()


if __name__ == "__main__":
    start()
