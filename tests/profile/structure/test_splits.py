"""Groups of modules that can be split along the tensor axis are found, and each of them really computes on its parts:
what a rank does not hold cannot change what it contributes, and the contributions add up."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright import batch as batches
from meshwright.call import load
from meshwright.profile.structure.splits import Split, SplitGroup
from meshwright.profile.structure.structure import Structure, structure
from tests.profile.models import make, tiny_decoder, tokens
from tests.profile.structure.structured import Unsplittable, biased, ids, transformer


def group_of(found: Structure, module: str) -> SplitGroup:
    return next(group for group in found.splits if any(split.module == module for split in group.splits))


def kinds(group: SplitGroup) -> dict[str, str]:
    return {split.module: split.kind for split in group.splits}


# ---- what is found


def test_attention_is_split_by_heads_and_feedforward_by_columns_then_rows() -> None:
    found = structure(tiny_decoder(), tokens(4))
    attention = group_of(found, "blocks.1.attention.q")
    assert kinds(attention) == {
        "blocks.1.attention.q": "heads",
        "blocks.1.attention.k": "heads",
        "blocks.1.attention.v": "heads",
        "blocks.1.attention.o": "row",
    }
    assert (attention.heads, attention.kv_heads, attention.degree) == (4, 4, 4)
    feedforward = group_of(found, "blocks.1.feedforward.up")
    assert kinds(feedforward) == {"blocks.1.feedforward.up": "column", "blocks.1.feedforward.down": "row"}
    assert feedforward.degree == 128
    assert [split.crosses for split in feedforward.splits] == ["", "all_reduce"]


def test_grouped_queries_and_gates_are_split_together() -> None:
    model, batch, _ = make("llama")
    found = structure(model, batch)
    attention = group_of(found, "blocks.0.attention.o")
    assert (attention.heads, attention.kv_heads, attention.degree) == (4, 2, 2)
    assert kinds(group_of(found, "blocks.0.feedforward.gate")) == {
        "blocks.0.feedforward.up": "column",
        "blocks.0.feedforward.gate": "column",
        "blocks.0.feedforward.down": "row",
    }


def test_one_key_value_head_cannot_be_split() -> None:
    found = structure(tiny_decoder(kv_heads=1), tokens(4))
    assert not any("attention" in group.name for group in found.splits)


def test_tied_embedding_and_head_are_split_by_vocabulary_together() -> None:
    tied = structure(tiny_decoder(), tokens(4))
    assert kinds(group_of(tied, "embedding")) == {"embedding": "vocabulary", "head": "vocabulary"}
    untied = structure(tiny_decoder(tied=False), tokens(4))
    assert kinds(group_of(untied, "embedding")) == {"embedding": "vocabulary"}
    assert kinds(group_of(untied, "head")) == {"head": "vocabulary"}
    assert not any(split.module == "positions" for group in tied.splits for split in group.splits)


def test_a_fused_projection_says_what_it_is_made_of() -> None:
    model, batch, _ = make("encoder")
    group = group_of(structure(model, batch), "1.layers.0.self_attn")
    assert kinds(group) == {"1.layers.0.self_attn": "heads", "1.layers.0.self_attn.out_proj": "row"}
    assert group.splits[0].parameter == "1.layers.0.self_attn.in_proj_weight"
    assert group.splits[0].parts == (32, 32, 32)
    assert group.heads == 4


def test_models_of_the_transformers_library() -> None:
    pytest.importorskip("transformers")
    gpt = structure(transformer("GPT2LMHeadModel"), ids())
    fused = group_of(gpt, "transformer.h.0.attn.c_attn")
    assert [(split.dim, split.parts) for split in fused.splits] == [(1, (32, 32, 32)), (0, ())]
    assert set(kinds(group_of(gpt, "lm_head"))) == {"transformer.wte", "lm_head"}
    bert = structure(transformer("BertForMaskedLM"), ids())
    assert group_of(bert, "bert.encoder.layer.1.attention.output.dense").heads == 4
    phi = structure(transformer("Phi3ForCausalLM"), ids())
    uneven = group_of(phi, "model.layers.0.self_attn.qkv_proj")
    assert (uneven.splits[0].parts, uneven.degree) == ((32, 16, 16), 2)


@pytest.mark.parametrize("name", ["swin", "swin2"])
def test_what_a_window_has_for_every_head_is_split_with_its_heads(name: str) -> None:
    group = group_of(structure(*biased(name)), "features.3.1.attn.qkv")
    found = {split.parameter.removeprefix("features.3.1.attn."): (split.kind, split.dim) for split in group.splits}
    by_name = {"swin": {"relative_position_bias_table": 1}, "swin2": {"logit_scale": 0, "cpb_mlp.2.weight": 0}}
    assert found.pop("qkv.weight") == ("heads", 0)
    assert found.pop("proj.weight") == ("row", 1)
    assert found == {parameter: ("heads", dim) for parameter, dim in by_name[name].items()}
    assert (group.heads, group.degree, group.splits[0].parts) == (4, 4, (48, 48, 48))


@pytest.mark.parametrize("layers", [2, 7])
def test_attention_that_shares_a_bias_by_position_is_split_together(layers: int) -> None:
    model, batch = biased("t5", layers)
    group = group_of(structure(model, batch), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias")
    assert kinds(group).pop("encoder.block.0.layer.0.SelfAttention.relative_attention_bias") == "heads"
    assert sum(split.kind == "row" for split in group.splits) == layers
    assert len(group.splits) == 4 * layers + 1
    assert next(split.dim for split in group.splits if "relative" in split.parameter) == 1


def test_a_bias_for_every_head_that_no_parameter_holds_is_not_split() -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).unflatten(-1, (4, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            slopes = torch.arange(4.0).view(1, 4, 1, 1) * torch.arange(float(x.shape[1]))
            mixed = (q @ k.transpose(-1, -2) + slopes).softmax(-1) @ v
            out: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
            return out

    assert not any(group.heads for group in structure(Slopes(), torch.zeros(4, 3, 8)).splits)


def test_a_layer_whose_bias_is_kept_elsewhere_is_not_split() -> None:
    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
            self.added = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(nn.functional.linear(x, self.up.weight, self.added))
            return out

    assert structure(Elsewhere(), torch.zeros(4, 8)).splits == ()


def test_a_models_own_published_splits_are_used() -> None:
    pytest.importorskip("transformers")
    found = structure(transformer("LlamaForCausalLM"), ids())
    group = group_of(found, "model.layers.1.self_attn.o_proj")
    assert {split.source for split in group.splits} == {"published"}
    assert (group.heads, group.kv_heads, group.degree) == (4, 2, 2)


def test_published_splits_that_cannot_be_derived_stand_for_themselves() -> None:
    class Published(Unsplittable):
        _tp_plan: ClassVar = {"b": "colwise", "c": "rowwise"}

    found = structure(Published(), torch.zeros(4, 8))
    assert kinds(group_of(found, "b")) == {"b": "column", "c": "row"}
    assert group_of(found, "b").degree == 4
    assert group_of(found, "b").splits[0].source == "published"


def test_where_nothing_can_be_split_nothing_is() -> None:
    assert structure(Unsplittable(), torch.zeros(4, 8)).splits == ()


def test_a_part_that_is_used_whole_elsewhere_is_not_split() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            wide = self.up(x).relu()
            return self.down(wide), wide.mean(-1)

    assert structure(Peeks(), torch.zeros(4, 8)).splits == ()


def test_writing_in_place_into_a_larger_tensor_is_not_followed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            room = x.new_zeros(2, x.shape[0], 16)
            room[0] = self.up(x)
            out: Tensor = self.down(room.sum(0))
            return out

    assert structure(Writes(), torch.zeros(4, 8)).splits == ()


def test_the_classifier_of_vgg16_holds_the_weights_and_does_not_do_the_work() -> None:
    with torch.device("meta"):
        model = load("torchvision.models.vgg16")()
        sample = (torch.empty(2, 3, 224, 224), torch.empty(2, dtype=torch.long))
    found = structure(model, sample)
    (chain,) = found.wide
    assert chain.modules == ("classifier.0", "classifier.3", "classifier.6")
    assert chain.parameter_share == pytest.approx(0.8936, abs=1e-3)
    assert chain.flop_share < 0.01
    assert kinds(group_of(found, "classifier.0")) == {"classifier.0": "column", "classifier.3": "row"}


# ---- each group computes on its parts


class Sums(TorchDispatchMode):
    """The outputs of the products with one weight. Those with other weights may be `given`: what all ranks added up
    to."""

    def __init__(self, weight: Tensor, given: dict[int, list[Tensor]]) -> None:
        super().__init__()
        self.weight = weight
        self.given = {pointer: iter(results) for pointer, results in given.items()}
        self.seen: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pointers = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
        if func._overloadpacket.__name__ not in ("mm", "addmm", "bmm"):
            return result
        if self.weight.untyped_storage().data_ptr() in pointers:
            self.seen.append(result.clone())
        for pointer in self.given.keys() & set(pointers):
            return next(self.given[pointer]).clone()
        return result


def own(split: Split, rank: int, degree: int) -> Tensor:
    """Which elements of the split dimension the rank holds."""
    held = torch.zeros(split.size, dtype=torch.bool)
    start = 0
    for part in split.parts or (split.size,):
        share = part // degree
        held[start + rank * share : start + (rank + 1) * share] = True
        start += part
    return held


def bias_of(model: nn.Module, split: Split) -> Tensor | None:
    module = model.get_submodule(split.module)
    name = "in_proj_bias" if split.parameter.endswith("in_proj_weight") else "bias"
    bias: Tensor | None = getattr(module, name, None)
    return bias


def contribution(
    model: nn.Module,
    batch: Any,
    group: SplitGroup,
    row: Split,
    rank: int,
    degree: int,
    given: dict[int, list[Tensor]],
) -> Tensor:
    """What one rank adds to the row layer's output: what it does not hold is random in the columns, zero in rows."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for split in group.splits:
            weight = model.get_parameter(split.parameter)
            gone = ~own(split, rank, degree)
            at = (gone,) if split.dim == 0 else (slice(None), gone)
            if split.kind == "row":
                weight[at] = 0
            else:
                weight[at] = torch.randn_like(weight[at])
            bias = bias_of(model, split)
            if bias is not None and split.kind != "row":
                bias[gone] = torch.randn_like(bias[gone])
            elif bias is not None and rank:
                bias.zero_()
    result = row_outputs(model, batch, row, given)[0]
    model.load_state_dict(weights)
    return result


def row_outputs(model: nn.Module, batch: Any, row: Split, given: dict[int, list[Tensor]] | None = None) -> list[Tensor]:
    example = batches.split(batch)
    # With gradients, or torch's encoder takes a fused path.
    with Sums(model.get_parameter(row.parameter), given or {}) as sums:
        model(*example.arguments, **example.keywords)
    return [result.detach() for result in sums.seen]


def largest_error(model: nn.Module, batch: Any, group: SplitGroup) -> float:
    degree = 2 if group.degree % 2 == 0 else group.degree
    worst = 0.0
    rows = [split for split in group.splits if split.kind == "row"]
    wholes = {row.parameter: row_outputs(model, batch, row) for row in rows}
    pointers = {row.parameter: model.get_parameter(row.parameter).untyped_storage().data_ptr() for row in rows}
    for row in rows:
        whole = wholes[row.parameter][0]
        given = {pointers[name]: results for name, results in wholes.items() if name != row.parameter}
        parts = [contribution(model, batch, group, row, rank, degree, given) for rank in range(degree)]
        worst = max(worst, float((torch.stack(parts).sum(0) - whole).abs().max() / whole.abs().max()))
    return worst


HERE = ("gpt", "llama", "encoder", "mnist", "vgg")
THERE = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "DebertaV2ForMaskedLM",
)
BIASED = ("swin", "swin2", "t5")


@pytest.mark.parametrize("name", [*HERE, *THERE, *BIASED])
def test_the_parts_of_every_group_add_up_to_the_whole(name: str) -> None:
    if name in THERE:
        pytest.importorskip("transformers")
        torch.manual_seed(0)
        model, batch = transformer(name), ids()
    elif name in BIASED:
        model, batch = biased(name)
    else:
        model, batch, _ = make(name)
    model = model.eval().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch) if isinstance(batch, tuple) else batch
    groups = [group for group in structure(model, batch).splits if any(s.kind == "row" for s in group.splits)]
    assert groups
    assert name not in BIASED or any(group.heads for group in groups)
    for group in groups:
        assert largest_error(model, batch, group) < 1e-10, group.name


def test_a_wrong_group_does_not_add_up() -> None:
    model, batch, _ = make("encoder")
    model = model.eval().double()
    group = group_of(structure(model, batch), "1.layers.0.self_attn")
    torn = replace(group, splits=(replace(group.splits[0], parts=()), *group.splits[1:]))
    assert largest_error(model, batch, torn) > 1e-3
