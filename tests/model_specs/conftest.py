"""Single process that forms a whole model-parallel world."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_rank():
    """Megatron's groups in a world of one process."""
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
