"""Train a diffusion backbone: Megatron's flags plus the ``pulse`` group (see --help).

pulse run --nproc-per-node 4 launch/pretrain_diffusion.py \\
    --pulse-backbone uvit-s --pipeline-model-parallel-size 4 ...
"""

import os
import signal
import warnings

from megatron_pulse.processes import end_with_parent, open_closed_streams, without_collecting
from megatron_pulse.runtime.stop_signals import STOP

warnings.filterwarnings("ignore")
open_closed_streams()
STOP.listen()  # before the slow imports, so that an early stop signal is reported
if "TORCHELASTIC_RUN_ID" in os.environ:
    end_with_parent(signal.SIGTERM)  # without torchrun there is no parent to follow

with without_collecting():
    from megatron_pulse.integration.megatron import compat

    compat.install()  # before anything imports Megatron
    from megatron_pulse.integration.pretrain import main

if __name__ == "__main__":
    main()
