"""The decoder: its layers compute their formulas, and it can be built on the meta device and with fake tensors."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.errors import InputError
from meshwright.parallel.weights.initialize import initialize_model
from meshwright.workloads.text.decoder import (
    Decoder,
    NextTokenLoss,
    default_feedforward,
    rotate,
    rotation,
    token_accuracy,
)
from meshwright.workloads.text.tokens import tokens

SMALL: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 50}
LLAMA: dict[str, Any] = {
    **SMALL,
    "kv_heads": 2,
    "norm": "rms",
    "positions": "rotary",
    "activation": "swiglu",
    "tied": False,
    "bias": False,
}


def make_decoder(**keywords: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**{**SMALL, **keywords})


def text(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("keywords", [SMALL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 16), (2, 7), (2, 1)])
def test_the_decoder_accepts_any_batch_size_and_length(keywords: dict[str, Any], batch: int, length: int) -> None:
    assert make_decoder(**keywords)(text(batch, length)).shape == (batch, length, 50)


@pytest.mark.parametrize("keywords", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_a_token_does_not_change_outputs_before_it(keywords: dict[str, Any]) -> None:
    model, before = make_decoder(**keywords), text()
    after = before.clone()
    after[:, 9] = (after[:, 9] + 1) % 50
    first, second = model(before), model(after)
    assert torch.equal(first[:, :9], second[:, :9])
    assert not torch.allclose(first[:, 9:], second[:, 9:])


def test_grouped_query_attention_equals_attention_with_repeated_keys() -> None:
    grouped, full = make_decoder(**LLAMA), make_decoder(**{**LLAMA, "kv_heads": 4})
    weights = grouped.state_dict()
    for name in [name for name in weights if ".k." in name or ".v." in name]:
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    assert torch.allclose(grouped(text()), full(text()), atol=1e-6)


def test_as_many_kv_heads_as_heads_is_full_attention() -> None:
    model = make_decoder(kv_heads=4)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in make_decoder().named_parameters()
    }
    assert torch.equal(model(text()), make_decoder()(text()))


def test_attention_computes_its_formula() -> None:
    attention = make_decoder().blocks[0].get_submodule("attention")
    x = torch.randn(2, 5, 32)
    q, k, v = (attention.get_submodule(name)(x).view(2, 5, 4, 8).transpose(1, 2) for name in "qkv")
    scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)
    assert torch.allclose(attention(x), attention.get_submodule("o")(mixed), atol=1e-6)


def test_rotary_positions_preserve_norms_and_depend_on_distances_only() -> None:
    cosine, sine = rotation(12, 8, 10_000.0, torch.device("cpu"))
    q, k = torch.randn(8), torch.randn(8)
    turned_q, turned_k = (rotate(x.expand(12, 8), (cosine, sine)) for x in (q, k))
    assert torch.allclose(turned_q.norm(dim=-1), q.norm().expand(12), atol=1e-5)
    scores = turned_q @ turned_k.T
    for distance in range(12):
        along = scores.diagonal(distance)
        assert torch.allclose(along, along[0].expand_as(along), atol=1e-4)
    assert torch.equal(turned_q[0], q)


def test_only_learned_positions_limit_the_length() -> None:
    longer = text(length=20)
    assert make_decoder(**LLAMA)(longer).shape == (2, 20, 50)
    with pytest.raises(InputError, match="20 tokens long, but the model has learned positions for sequence = 16"):
        make_decoder()(longer)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_outputs_depend_on_the_position(positions: str) -> None:
    model = make_decoder(positions=positions)
    same = torch.tensor([[7, 3, 3, 3]])
    logits = model(same)
    assert not torch.allclose(logits[0, 2], logits[0, 3], atol=1e-5)
    assert (model.positions is None) == (positions == "rotary")


def test_without_a_head_the_output_is_that_of_the_last_norm() -> None:
    model = make_decoder(head=False)
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, model.embedding.embedding_dim)
    assert not any(name.startswith("head") for name in model.state_dict())


def test_a_tied_head_shares_the_weight_of_the_embedding() -> None:
    model = make_decoder()
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())
    assert make_decoder(tied=False).head.weight is not model.embedding.weight


def test_initial_weights_are_those_of_gpt2_and_depend_on_their_names() -> None:
    def weights(layers: int) -> dict[str, Tensor]:
        keywords = {**SMALL, "layers": layers, "hidden": 64}
        return initialize_model(lambda: Decoder(**keywords), seed=1).state_dict()

    initial_weights, query, out = weights(8), "blocks.3.attention.q.weight", "blocks.3.attention.o.weight"
    for name, std in (("embedding.weight", 0.02), (query, 0.02), (out, 0.02 / 16**0.5)):
        assert float(initial_weights[name].std()) == pytest.approx(std, rel=0.05)
    assert all(not weight.any() for name, weight in initial_weights.items() if name.endswith("bias"))
    assert torch.equal(weights(4)[query], initial_weights[query])


def test_without_bias_no_parameter_is_a_bias() -> None:
    assert not [name for name, _ in make_decoder(bias=False).named_parameters() if "bias" in name]


def test_dropout_is_active_in_training_only() -> None:
    model = make_decoder(dropout=0.5)
    assert not torch.equal(model(text()), model(text()))
    model.eval()
    assert torch.equal(model(text()), model(text()))


@pytest.mark.parametrize("keywords", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_the_decoder_trains_under_autocast(keywords: dict[str, Any]) -> None:
    model = make_decoder(**keywords)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(text())
    assert output.dtype == torch.bfloat16
    NextTokenLoss()(output, text()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("keywords", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_the_decoder_runs_on_fake_tensors(keywords: dict[str, Any]) -> None:
    with FakeTensorMode():
        model = Decoder(**keywords)
        inputs = torch.randint(50, (2, 16))
        loss = NextTokenLoss()(model(inputs), inputs)
        loss.backward()
        assert loss.shape == ()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_the_loss_is_the_mean_over_targets_that_are_not_ignored() -> None:
    logits, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    expected = F.cross_entropy(logits.transpose(1, 2), targets)
    assert torch.allclose(NextTokenLoss()(logits, targets), expected)
    assert NextTokenLoss()(logits.bfloat16(), targets).dtype == torch.float32
    right, counted = token_accuracy(F.one_hot(targets.clamp(min=0), 7).float(), targets)
    assert (int(right), int(counted)) == (7, 7)


@pytest.mark.parametrize(("hidden", "wide"), [(4096, 11008), (5120, 13824), (768, 2048)])
def test_the_default_feedforward_width_is_that_of_llama(hidden: int, wide: int) -> None:
    assert default_feedforward(hidden, "swiglu") == wide
    assert default_feedforward(hidden, "gelu") == 4 * hidden


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"heads": 5}, r"hidden\(32\) is not divisible by heads\(5\)"),
        ({"kv_heads": 3}, r"heads\(4\) is not divisible by kv_heads\(3\)"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 32.0}, r"hidden is 32\.0"),
        ({"norm": "layers"}, "norm is 'layers': did you mean 'layer'"),
        ({"positions": "alibi"}, "positions is 'alibi': known are learned, rotary"),
        ({"hidden": 36, "heads": 12, "positions": "rotary"}, "3 channels per head"),
    ],
)
def test_wrong_decoder_keywords_are_input_errors(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_decoder(**keywords)


@pytest.mark.parametrize("keywords", [SMALL, LLAMA], ids=["gpt", "llama"])
def test_the_decoder_learns_the_generated_rule(keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Decoder(**keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    dataset: Any = tokens(sequence=16, vocabulary=50, alphabet=16, samples=16)
    inputs, targets = (torch.stack(part) for part in zip(*(dataset[i] for i in range(16)), strict=True))
    losses = [_step(model, optimizer, inputs, targets) for _ in range(20)]
    assert losses[-1] < 0.6 * losses[0]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    optimizer.zero_grad()
    loss = NextTokenLoss()(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
