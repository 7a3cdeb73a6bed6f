import pytest
import torch
import torch.nn.functional as F

from meshwright.errors import InputError
from meshwright.workloads.text.skip_gram import NegativeSampling, SkipGram, found_first


def test_scores_are_products_of_centers_and_contexts() -> None:
    torch.manual_seed(0)
    model = SkipGram(30, 8)
    torch.nn.init.normal_(model.context.weight)
    centers, contexts = torch.randint(30, (2, 5)), torch.randint(30, (2, 5, 4))
    scores = model(centers, contexts)
    assert scores.shape == (2, 5, 4)
    expected = model.center.weight[centers[1, 2]] @ model.context.weight[contexts[1, 2, 3]]
    assert torch.allclose(scores[1, 2, 3], expected)


def test_the_loss_computes_its_formula() -> None:
    scores = torch.randn(2, 3, 4)
    targets = torch.zeros(2, 3, 4)
    targets[..., 0] = 1
    expected = -F.logsigmoid(scores[..., 0]) - F.logsigmoid(-scores[..., 1:]).sum(-1)
    assert torch.allclose(NegativeSampling()(scores, targets), expected.mean())
    assert float(NegativeSampling()(scores.double(), targets)) == pytest.approx(float(expected.mean()))


def test_found_first_counts_words_whose_neighbour_has_the_largest_score() -> None:
    targets = torch.tensor([[[1.0, 0, 0], [1, 0, 0]]])
    hits, count = found_first(torch.tensor([[[3.0, 1, 2], [1, 2, 0]]]), targets)
    assert (float(hits), count) == (1, 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_are_sparse_if_the_model_is(sparse: bool) -> None:
    model = SkipGram(30, 8, sparse=sparse)
    targets = torch.tensor([[[1.0, 0.0]]])
    optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
    NegativeSampling()(model(torch.tensor([[3]]), torch.tensor([[[4, 5]]])), targets).backward()
    gradient = model.context.weight.grad
    assert gradient is not None
    assert gradient.is_sparse == sparse
    optimizer.step()
    assert model.context.weight.abs().sum(1).nonzero().flatten().tolist() == [4, 5]


def test_wrong_arguments_are_input_errors() -> None:
    with pytest.raises(InputError, match="the model's dim is 0"):
        SkipGram(10, 0)
