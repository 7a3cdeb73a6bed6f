"""The norm and the clipped gradients under every plan are those of one process."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.clip import clip_, global_norm
from meshwright.parallel.weights.state import full_gradients
from tests.parallel.hand_sharded import AXES, is_equal_on_all_ranks, shard_by_hand, whole_model
from tests.ranks import RankPool
from tests.soaked import all_but


def clip_on_ranks(rank: int, size: int, axes: dict[str, int], max_norm: float) -> tuple[float, dict[str, Tensor], bool]:
    sharded = shard_by_hand(axes, size)
    gradients = [(name, parameter.grad) for name, parameter in sharded.module.named_parameters()]
    norm = clip_(gradients, sharded.layouts, sharded.tied, sharded.mesh, max_norm)
    after = full_gradients(sharded.module, sharded.layouts, sharded.mesh, tied=sharded.tied)
    return float(norm), after, is_equal_on_all_ranks(float(norm))


@pytest.mark.parametrize("axes", all_but(AXES[::2], AXES), ids=str)
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clipping_under_every_plan(four: RankPool, axes: dict[str, int], max_norm: float) -> None:
    model = whole_model()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    for clipped_norm, gradients, same_everywhere in four.run(clip_on_ranks, axes, max_norm):
        assert same_everywhere
        assert clipped_norm == pytest.approx(norm, rel=1e-14)
        assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-13, atol=0)


def test_the_norm_of_bf16_gradients_in_one_process_is_exact() -> None:
    layer = nn.Linear(300, 300).to(torch.bfloat16)
    layer.weight.grad = torch.full_like(layer.weight, 0.01)
    gradients = [("weight", layer.weight.grad), ("bias", None)]
    norm = global_norm(gradients, {}, (), None)
    assert float(norm) == pytest.approx(300 * float(torch.tensor(0.01).bfloat16()), rel=1e-6), "bf16 would sum to less"
    assert float(global_norm([("bias", None)], {}, (), None)) == 0.0
    assert layer.weight.grad is not None
    clip_(gradients, {}, (), None, 0.3)
    assert float(layer.weight.grad[0, 0]) == pytest.approx(0.001, rel=0.01)
