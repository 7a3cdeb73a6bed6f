"""Groups of modules that can be split along the tensor axis are found, and ranks can really compute them in parts: what
a rank does not hold does not change its contribution, and the contributions add up to the whole."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.model_io.batch import split_batch
from meshwright.profile.structure.splits import ParameterSplit, SplitGroup
from meshwright.profile.structure.structure import Structure, find_structure
from meshwright.user.call import load
from tests.profile.models import small_model, tiny_decoder, token_batch
from tests.profile.structure.structured_models import Unsplittable, model_with_head_bias, token_ids, transformers_model
from tests.soaked import all_but


def group_of(structure: Structure, module: str) -> SplitGroup:
    return next(group for group in structure.splits if any(split.module == module for split in group.splits))


def split_kinds(group: SplitGroup) -> dict[str, str]:
    return {split.module: split.kind for split in group.splits}


# ---- which groups are found


def test_attention_is_split_by_heads_and_feedforward_by_columns_then_rows() -> None:
    structure = find_structure(tiny_decoder(), token_batch(4))
    attention = group_of(structure, "blocks.1.attention.q")
    assert split_kinds(attention) == {
        "blocks.1.attention.q": "heads",
        "blocks.1.attention.k": "heads",
        "blocks.1.attention.v": "heads",
        "blocks.1.attention.o": "row",
    }
    assert (attention.heads, attention.kv_heads, attention.degree) == (4, 4, 4)
    feedforward = group_of(structure, "blocks.1.feedforward.up")
    assert split_kinds(feedforward) == {"blocks.1.feedforward.up": "column", "blocks.1.feedforward.down": "row"}
    assert feedforward.degree == 128
    assert [split.communication for split in feedforward.splits] == ["", "all_reduce"]


def test_grouped_queries_and_gates_are_split_together() -> None:
    model, batch, _ = small_model("llama")
    structure = find_structure(model, batch)
    attention = group_of(structure, "blocks.0.attention.o")
    assert (attention.heads, attention.kv_heads, attention.degree) == (4, 2, 2)
    assert split_kinds(group_of(structure, "blocks.0.feedforward.gate")) == {
        "blocks.0.feedforward.up": "column",
        "blocks.0.feedforward.gate": "column",
        "blocks.0.feedforward.down": "row",
    }


def test_one_key_value_head_cannot_be_split() -> None:
    structure = find_structure(tiny_decoder(kv_heads=1), token_batch(4))
    assert not any("attention" in group.name for group in structure.splits)


def test_tied_embedding_and_head_are_split_by_vocabulary_together() -> None:
    tied = find_structure(tiny_decoder(), token_batch(4))
    assert split_kinds(group_of(tied, "embedding")) == {"embedding": "vocabulary", "head": "vocabulary"}
    untied = find_structure(tiny_decoder(tied=False), token_batch(4))
    assert split_kinds(group_of(untied, "embedding")) == {"embedding": "vocabulary"}
    assert split_kinds(group_of(untied, "head")) == {"head": "vocabulary"}
    assert not any(split.module == "positions" for group in tied.splits for split in group.splits)


class TableBeforeLayers(nn.Module):
    """Adds a table's rows to the output of a layer, before another layer takes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.product = nn.Parameter(torch.randn(16, 16))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.second(F.layer_norm(F.relu(self.first(x)), (32,)))
        return self.head(self.norm(x @ self.product))


def test_a_table_that_is_split_with_other_layers_is_not_split_by_vocabulary_too() -> None:
    structure = find_structure(TableBeforeLayers(), (torch.arange(24).reshape(2, 12) % 12, torch.zeros(2, 12)))
    split = [split for group in structure.splits for split in group.splits]
    assert [(one.kind, one.dim) for one in split if one.parameter == "words.weight"] == [("column", 1)]
    assert len({one.parameter for one in split}) == len(split)


def test_a_fused_projection_lists_its_parts() -> None:
    model, batch, _ = small_model("encoder")
    group = group_of(find_structure(model, batch), "1.layers.0.self_attn")
    assert split_kinds(group) == {"1.layers.0.self_attn": "heads", "1.layers.0.self_attn.out_proj": "row"}
    assert group.splits[0].parameter == "1.layers.0.self_attn.in_proj_weight"
    assert group.splits[0].parts == (32, 32, 32)
    assert group.heads == 4


def test_models_of_the_transformers_library_are_split() -> None:
    pytest.importorskip("transformers")
    gpt = find_structure(transformers_model("GPT2LMHeadModel"), token_ids())
    fused = group_of(gpt, "transformer.h.0.attn.c_attn")
    assert [(split.dim, split.parts) for split in fused.splits] == [(1, (32, 32, 32)), (0, ())]
    assert set(split_kinds(group_of(gpt, "lm_head"))) == {"transformer.wte", "lm_head"}
    bert = find_structure(transformers_model("BertForMaskedLM"), token_ids())
    assert group_of(bert, "bert.encoder.layer.1.attention.output.dense").heads == 4
    phi = find_structure(transformers_model("Phi3ForCausalLM"), token_ids())
    uneven = group_of(phi, "model.layers.0.self_attn.qkv_proj")
    assert (uneven.splits[0].parts, uneven.degree) == ((32, 16, 16), 2)


@pytest.mark.parametrize("name", all_but({"swin"}, ["swin", "swin2"]))
def test_tables_with_an_entry_per_head_are_split_with_the_heads(name: str) -> None:
    group = group_of(find_structure(*model_with_head_bias(name)), "features.3.1.attn.qkv")
    kinds = {split.parameter.removeprefix("features.3.1.attn."): (split.kind, split.dim) for split in group.splits}
    by_name = {"swin": {"relative_position_bias_table": 1}, "swin2": {"logit_scale": 0, "cpb_mlp.2.weight": 0}}
    assert kinds.pop("qkv.weight") == ("heads", 0)
    assert kinds.pop("proj.weight") == ("row", 1)
    assert kinds == {parameter: ("heads", dim) for parameter, dim in by_name[name].items()}
    assert (group.heads, group.degree, group.splits[0].parts) == (4, 4, (48, 48, 48))


@pytest.mark.parametrize("layers", all_but({2}, [2, 6]))  # the last five of six are equal blocks
def test_layers_that_share_a_bias_by_relative_position_are_split_together(layers: int) -> None:
    model, batch = model_with_head_bias("t5", layers)
    group = group_of(find_structure(model, batch), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias")
    assert split_kinds(group).pop("encoder.block.0.layer.0.SelfAttention.relative_attention_bias") == "heads"
    assert sum(split.kind == "row" for split in group.splits) == layers
    assert len(group.splits) == 4 * layers + 1
    assert next(split.dim for split in group.splits if "relative" in split.parameter) == 1


def test_attention_with_a_computed_bias_per_head_is_not_split() -> None:
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

    assert not any(group.heads for group in find_structure(Slopes(), torch.zeros(4, 3, 8)).splits)


def test_a_layer_whose_bias_belongs_to_another_module_is_not_split() -> None:
    class BiasElsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8)
            self.other_bias = nn.Parameter(torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(nn.functional.linear(x, self.up.weight, self.other_bias))
            return out

    assert find_structure(BiasElsewhere(), torch.zeros(4, 8)).splits == ()


def test_the_tensor_parallel_plan_of_a_transformers_model_is_used() -> None:
    pytest.importorskip("transformers")
    structure = find_structure(transformers_model("LlamaForCausalLM"), token_ids())
    group = group_of(structure, "model.layers.1.self_attn.o_proj")
    assert {split.source for split in group.splits} == {"published"}
    assert (group.heads, group.kv_heads, group.degree) == (4, 2, 2)


def test_splits_that_only_the_models_plan_has_are_added() -> None:
    class WithPlan(Unsplittable):
        _tp_plan: ClassVar = {"b": "colwise", "c": "rowwise"}

    structure = find_structure(WithPlan(), torch.zeros(4, 8))
    assert split_kinds(group_of(structure, "b")) == {"b": "column", "c": "row"}
    assert group_of(structure, "b").degree == 4
    assert group_of(structure, "b").splits[0].source == "published"


def test_a_model_that_cannot_be_split_has_no_groups() -> None:
    assert find_structure(Unsplittable(), torch.zeros(4, 8)).splits == ()


def test_a_layer_whose_whole_output_is_used_elsewhere_is_not_split() -> None:
    class UsesWholeOutput(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            wide = self.up(x).relu()
            return self.down(wide), wide.mean(-1)

    assert find_structure(UsesWholeOutput(), torch.zeros(4, 8)).splits == ()


def test_a_layer_whose_output_is_written_into_a_larger_tensor_is_not_split() -> None:
    class WritesInPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            buffer = x.new_zeros(2, x.shape[0], 16)
            buffer[0] = self.up(x)
            out: Tensor = self.down(buffer.sum(0))
            return out

    assert find_structure(WritesInPlace(), torch.zeros(4, 8)).splits == ()


def test_the_classifier_of_vgg16_is_a_wide_chain() -> None:
    with torch.device("meta"):
        model = load("torchvision.models.vgg16")()
        sample = (torch.empty(2, 3, 224, 224), torch.empty(2, dtype=torch.long))
    structure = find_structure(model, sample)
    (chain,) = structure.wide_chains
    assert chain.modules == ("classifier.0", "classifier.3", "classifier.6")
    assert chain.parameter_share == pytest.approx(0.8936, abs=1e-3)
    assert chain.flop_share < 0.01
    assert split_kinds(group_of(structure, "classifier.0")) == {"classifier.0": "column", "classifier.3": "row"}


# ---- ranks can compute each group in parts


class ProductOutputs(TorchDispatchMode):
    """Records the outputs of all matrix products with one weight. Those of products with other weights are replaced by
    `known`, where it has any: by what all ranks together compute."""

    def __init__(self, weight: Tensor, known: dict[int, list[Tensor]]) -> None:
        super().__init__()
        self.weight = weight
        self.known = {pointer: iter(results) for pointer, results in known.items()}
        self.outputs: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pointers = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)]
        if func._overloadpacket.__name__ not in ("mm", "addmm", "bmm"):
            return result
        if self.weight.untyped_storage().data_ptr() in pointers:
            self.outputs.append(result.clone())
        for pointer in self.known.keys() & set(pointers):
            return next(self.known[pointer]).clone()
        return result


def held_elements(split: ParameterSplit, rank: int, degree: int) -> Tensor:
    """A mask of the elements of the split dimension that the rank holds."""
    mask = torch.zeros(split.size, dtype=torch.bool)
    start = 0
    for part in split.parts or (split.size,):
        share = part // degree
        mask[start + rank * share : start + (rank + 1) * share] = True
        start += part
    return mask


def bias_of(model: nn.Module, split: ParameterSplit) -> Tensor | None:
    module = model.get_submodule(split.module)
    name = "in_proj_bias" if split.parameter.endswith("in_proj_weight") else "bias"
    bias: Tensor | None = getattr(module, name, None)
    return bias


def contribution(
    model: nn.Module,
    batch: Any,
    group: SplitGroup,
    row: ParameterSplit,
    rank: int,
    degree: int,
    known: dict[int, list[Tensor]],
) -> Tensor:
    """What one rank adds to the output of a row layer. Weights that it does not hold are random in column layers and
    zero in row layers."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for split in group.splits:
            weight = model.get_parameter(split.parameter)
            missing = ~held_elements(split, rank, degree)
            index = (missing,) if split.dim == 0 else (slice(None), missing)
            if split.kind == "row":
                weight[index] = 0
            else:
                weight[index] = torch.randn_like(weight[index])
            bias = bias_of(model, split)
            if bias is not None and split.kind != "row":
                bias[missing] = torch.randn_like(bias[missing])
            elif bias is not None and rank:
                bias.zero_()
    result = row_outputs(model, batch, row, known)[0]
    model.load_state_dict(weights)
    return result


def row_outputs(
    model: nn.Module, batch: Any, row: ParameterSplit, known: dict[int, list[Tensor]] | None = None
) -> list[Tensor]:
    inputs = split_batch(batch)
    # With gradients: without them torch's encoder runs a fused fast path.
    with ProductOutputs(model.get_parameter(row.parameter), known or {}) as products:
        model(*inputs.arguments, **inputs.keywords)
    return [result.detach() for result in products.outputs]


def largest_error(model: nn.Module, batch: Any, group: SplitGroup) -> float:
    degree = 2 if group.degree % 2 == 0 else group.degree
    worst = 0.0
    rows = [split for split in group.splits if split.kind == "row"]
    wholes = {row.parameter: row_outputs(model, batch, row) for row in rows}
    pointers = {row.parameter: model.get_parameter(row.parameter).untyped_storage().data_ptr() for row in rows}
    for row in rows:
        whole = wholes[row.parameter][0]
        known = {pointers[name]: results for name, results in wholes.items() if name != row.parameter}
        parts = [contribution(model, batch, group, row, rank, degree, known) for rank in range(degree)]
        worst = max(worst, float((torch.stack(parts).sum(0) - whole).abs().max() / whole.abs().max()))
    return worst


MODELS = ("gpt", "llama", "encoder", "mnist", "vgg")
TRANSFORMERS_MODELS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "Phi3ForCausalLM",
    "GPTNeoXForCausalLM",
    "DebertaV2ForMaskedLM",
)
MODELS_WITH_HEAD_BIAS = ("swin", "swin2", "t5")


@pytest.mark.parametrize(
    "name",
    all_but({"gpt", "llama", "vgg", "GPT2LMHeadModel", "t5"}, [*MODELS, *TRANSFORMERS_MODELS, *MODELS_WITH_HEAD_BIAS]),
)
def test_the_parts_of_every_group_add_up_to_the_whole(name: str) -> None:
    if name in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers")
        torch.manual_seed(0)
        model, batch = transformers_model(name), token_ids()
    elif name in MODELS_WITH_HEAD_BIAS:
        model, batch = model_with_head_bias(name)
    else:
        model, batch, _ = small_model(name)
    model = model.eval().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch) if isinstance(batch, tuple) else batch
    groups = [group for group in find_structure(model, batch).splits if any(s.kind == "row" for s in group.splits)]
    assert groups
    assert name not in MODELS_WITH_HEAD_BIAS or any(group.heads for group in groups)
    for group in groups:
        assert largest_error(model, batch, group) < 1e-10, group.name


def test_a_wrong_group_does_not_add_up() -> None:
    model, batch, _ = small_model("encoder")
    model = model.eval().double()
    group = group_of(find_structure(model, batch), "1.layers.0.self_attn")
    wrong = replace(group, splits=(replace(group.splits[0], parts=()), *group.splits[1:]))
    assert largest_error(model, batch, wrong) > 1e-3
