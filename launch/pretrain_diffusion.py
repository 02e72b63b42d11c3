"""Train a diffusion backbone: Megatron's flags plus the ``pulse`` group (see --help).

torchrun --nproc-per-node 4 launch/pretrain_diffusion.py \\
    --pulse-backbone uvit-s --pipeline-model-parallel-size 4 ...
"""

import warnings

warnings.filterwarnings("ignore")

from megatron_pulse.integration import compat  # noqa: E402

compat.install()  # before anything imports Megatron

from megatron_pulse.integration.pretrain import main  # noqa: E402

if __name__ == "__main__":
    main()
