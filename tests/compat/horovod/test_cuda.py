"""On a GPU: operations and training with CUDA tensors, on one rank and on two ranks that share the GPU over Gloo."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import meshwright.compat.horovod as hvd
from tests.compat.horovod import test_operations as operations
from tests.compat.horovod import test_optimizer as training
from tests.compat.horovod.world import run_horovod
from tests.ranks import RankPool, ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CHECKS = (
    *(operations.reductions, operations.in_place_grouped_and_scaled, operations.other_orders_and_handles),
    *(operations.moves, operations.scatters, operations.gradients, operations.objects_and_parameters),
    *(operations.sparse_tensors, operations.process_sets, operations.joins_with_uneven_data, operations.batch_norm),
)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def gpu_world(request: pytest.FixtureRequest) -> Iterator[RankPool | None]:
    if request.param == 1:
        yield None
    else:
        with ranks(2) as pool:
            yield pool


def on_gpu(check: Callable[[], None]) -> None:
    """Runs a check in which every new tensor is on the GPU."""
    with torch.device("cuda"):
        check()


def train_on_gpu() -> tuple[list[Tensor], str]:
    """Trains the network of the CPU tests on the GPU, from other weights on each rank, and returns its weights."""
    rank, size = hvd.rank(), hvd.size()
    model = training.network().cuda()
    if rank:
        for parameter in model.parameters():
            parameter.data.zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(training.adam(model), model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for x, y in training.batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rank::size].cuda()), y[rank::size].cuda()).backward()
        optimizer.step()
    weights = [parameter.detach() for parameter in model.parameters()]
    return [weight.cpu() for weight in weights], weights[0].device.type


@pytest.mark.parametrize("check", CHECKS)
def test_operation(gpu_world: RankPool | None, check: Callable[[], None]) -> None:
    run_horovod(gpu_world, on_gpu, check)


def test_weights_are_those_of_one_device(gpu_world: RankPool | None) -> None:
    expected = training.train_alone()
    for weights, device in run_horovod(gpu_world, train_on_gpu):
        assert device == "cuda"
        for ours, alone in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, alone, rtol=0, atol=1e-9)
