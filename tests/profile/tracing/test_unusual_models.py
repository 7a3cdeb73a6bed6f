"""Models that a user may have, and that are neither traced nor measured like plain ones: each gets a profile, or one
error that says why not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import NotPredictable
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.tracing.real_steps import trace_or_measure_profile
from tests.profile.test_fake import pictures

CLASSES = torch.zeros(4, dtype=torch.long)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


class Detector(nn.Module):
    """Returns a dict of losses, as torchvision's detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        boxes = [self.head(self.backbone(image[None]).mean((2, 3))) for image in images]
        losses = [F.l1_loss(box.expand(len(t["boxes"]), 4), t["boxes"]) for box, t in zip(boxes, targets, strict=True)]
        return {"box": sum(losses, torch.zeros(())), "size": sum(box.abs().mean() for box in boxes)}


class PerSample(Layers):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(super().forward)(x)
        return out


class WithTangent(Layers):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))[1]
        return out


class FixedBatch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 4, "this model takes four samples"
        return super().forward(x)


class GraphLayer(nn.Module):
    """Multiplies with the sparse matrix of a graph, whose nodes are the samples."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("edges", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.edges, self.layer(x))


def _old_weight_norm() -> nn.Module:
    model = Layers()
    nn.utils.weight_norm(model.first)
    return model


@pytest.mark.parametrize(
    ("build", "batch", "method"),
    [
        (PerSample, (torch.randn(4, 8), CLASSES), "traced"),
        (WithTangent, (torch.randn(4, 8), CLASSES), "traced"),
        (_old_weight_norm, (torch.randn(4, 8), CLASSES), "traced"),
        (FixedBatch, (torch.randn(4, 8), CLASSES), "measured steps at batch 4"),
        (GraphLayer, (torch.randn(4, 8), CLASSES), "measured steps at batch 4"),
        (Detector, pictures((20, 24), (24, 16)), "measured steps at batches 1 and 2"),
    ],
)
def test_an_unusual_model_has_a_profile(build: Callable[[], nn.Module], batch: Any, method: str) -> None:
    model = build()
    loss = None if isinstance(model, Detector) else F.cross_entropy
    profile, how = trace_or_measure_profile(model, batch, loss, on_gpu=False, with_structure=True)
    assert how.startswith(method)
    assert profile.flops(4, "forward") > 0
    assert profile.flops(4, "backward") > 0


def test_a_model_that_fails_cannot_be_predicted() -> None:
    class Uncopied(Layers):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("this model holds a socket")

    with pytest.raises(NotPredictable, match="this model holds a socket"):
        trace_or_measure_profile(Uncopied(), (torch.randn(4, 8), CLASSES), F.cross_entropy, on_gpu=False)


class Speech(nn.Module):
    """Checks its targets, and computes the CTC loss of those that are not padding, as the speech models of transformers
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 3:
            raise ValueError("a label is not in the vocabulary")
        mask = labels >= 0
        scores = self.layers(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(scores, labels.masked_select(mask), lengths, mask.sum(-1))


def test_a_model_that_checks_its_targets_is_predicted_without_values() -> None:
    batch = (torch.randn(4, 12, 8), torch.tensor([[1, 2], [1, -1], [2, 1], [2, 2]]))
    measured, how = trace_or_measure_profile(Speech(), batch, None, on_gpu=False)
    assert how.startswith("measured")
    with torch.device("meta"):
        model = Speech()
    assumed, how = trace_or_measure_profile(model, tuple(t.to("meta") for t in batch), None, on_gpu=False)
    assert how == "traced steps at batches 2, 3 and 5, in which conditions on values are false"
    for phase in ("forward", "backward"):
        assert assumed.flops(4, phase) == pytest.approx(measured.flops(4, phase))
    assert assumed.saved_bytes(4) == pytest.approx(measured.saved_bytes(4), rel=0.3)


class OwnOptimizer(torch.optim.SGD):
    def __init__(self, parameters: Any, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)
        self.model = model


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda model: torch.optim.Muon([model.first.weight]), 1.0),
        (lambda model: torch.optim.LBFGS(model.parameters()), 2.0),
        (lambda model: OwnOptimizer(model.parameters(), model), 2.0),
    ],
)
def test_an_optimizer_that_does_not_step_on_vectors_has_a_cost(make: Any, state: float) -> None:
    cost = optimizer_cost(make(Layers()), on_gpu=False)
    assert cost.state_ratio == pytest.approx(state)
    assert not cost.elementwise
