"""Train a diffusion backbone: Megatron's flags plus the ``pulse`` group (see --help).

pulse run --nproc-per-node 4 launch/pretrain_diffusion.py \\
    --pulse-backbone uvit-s --pipeline-model-parallel-size 4 ...
"""

from megatron_pulse.integration.train_entry import start

if __name__ == "__main__":
    start()
