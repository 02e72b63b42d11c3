"""Imported once by the server that test ranks are forked from: all that is slow to import."""

import argparse
import importlib
import pkgutil
import sys
import warnings

warnings.filterwarnings("ignore")

from megatron_pulse.processes import without_collecting  # noqa: E402

with without_collecting():
    from megatron_pulse.integration.megatron import compat

    compat.install()

    import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader  # noqa: F401
    import megatron.core.models.mimo.optimizer  # noqa: F401
    import megatron.training.training  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    import megatron_pulse.integration.megatron.linear_wgrad  # noqa: F401
    import megatron_pulse.integration.pretrain  # noqa: F401
    import model_specs

    for found in pkgutil.walk_packages(model_specs.__path__, "model_specs."):
        if not found.name.startswith("model_specs.derived"):
            importlib.import_module(found.name)

from megatron_pulse.data.images.digits import load_digits  # noqa: E402
from megatron_pulse.integration.flags.pulse_options import add_pulse_arguments  # noqa: E402
from megatron_pulse.planner.schedule.search.synthesize import compile_search  # noqa: E402
from tests.memory import collect_seldom, in_large_pages  # noqa: E402
from tests.remembered import cache_small_chains, remember_analyses  # noqa: E402

torch.set_num_threads(1)
load_digits("digits8")
compile_search()
add_pulse_arguments(argparse.ArgumentParser())
remember_analyses()
cache_small_chains()
model_specs.available()

IMPORTED = frozenset(sys.modules)
"""What every rank imports; the rest is for those that derive a chain."""
with without_collecting():
    import bitsandbytes  # noqa: F401
    import diffusers

    diffusers.UNet2DModel  # noqa: B018
    torch.export.export(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), strict=False)
collect_seldom()  # what ranks collect is their own: they write less to memory that they share
in_large_pages()
