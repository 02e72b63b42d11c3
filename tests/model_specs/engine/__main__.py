"""Prints, as JSON, what can be said of Transformer Engine's layers without a GPU.

python -m tests.model_specs.engine .venv/transformer-engine
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.model_specs.engine.stubs import compute_on_host, import_without_libraries


def main() -> None:
    """The command."""
    from megatron_pulse.integration.megatron import compat

    import_without_libraries(sys.argv[1])
    compat.install()
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    import tests.conftest  # noqa: F401  makes Megatron importable on a CPU
    from tests.model_specs.engine import families, waiting

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found: dict[str, Any] = {"families": families.compared()}
    compute_on_host()
    found |= {
        "layers": waiting.layers(),
        "steps": waiting.steps(),
        "untrained": waiting.untrained(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
