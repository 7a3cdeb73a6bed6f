"""Cuts lie between modules, and the values that cross a cut are all that the rest of the model needs: with all other
results from before the cut destroyed, the original forward pass still returns the model's output."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch, split_batch
from meshwright.profile.structure.cuts import BatchDimension, Cut
from meshwright.profile.structure.structure import Structure, find_structure
from meshwright.user.call import load
from meshwright.workloads.physics.network import SolutionNetwork
from meshwright.workloads.recommender.dlrm import DLRM
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import small_model, tiny_decoder, token_batch
from tests.profile.structure.structured_models import (
    MultiTask,
    ResidualParent,
    TwoTowers,
    UNet,
    token_ids,
    transformers_model,
)
from tests.soaked import all_but

SAMPLES = 4
BATCH = BatchDimension(1)


def cut_after(structure: Structure, module: str) -> Cut:
    return next(cut for cut in structure.cuts if cut.after == module)


# ---- which cuts are found


def test_a_decoder_is_cut_between_blocks_and_one_value_crosses() -> None:
    structure = find_structure(tiny_decoder(), token_batch(4))
    cut = cut_after(structure, "blocks.0")
    assert cut.before == "blocks.1"
    (value,) = cut.crossing
    assert (value.module, value.role, value.used_by) == ("blocks.0", "output", ("blocks.1",))
    assert (value.shape, value.dtype, value.bytes_per_sample) == ((BATCH, 16, 32), "float32", 16 * 32 * 4)
    assert cut.shared == ("embedding.weight",)  # the head uses it again
    assert structure.ties[0].modules == ("embedding", "head")
    assert not any("attention" in cut.after or "feedforward" in cut.after for cut in structure.cuts)


@pytest.mark.soak
def test_resnet50_is_cut_between_its_bottlenecks() -> None:
    with torch.device("meta"):
        model = load("torchvision.models.resnet50")()
        sample = (torch.empty(2, 3, 64, 64), torch.empty(2, dtype=torch.long))
    structure = find_structure(model, sample)
    between_blocks = [cut for cut in structure.cuts if cut.after.startswith("layer") and cut.before.startswith("layer")]
    assert len(between_blocks) == 15  # there are 16 blocks
    assert all(len(cut.crossing) == 1 for cut in structure.cuts)
    assert structure.pieces[:5] == ("conv1", "bn1", "relu", "maxpool", "layer1.0")
    (no_cut,) = structure.no_cuts
    assert (no_cut.before, no_cut.reason) == ("relu", "relu overwrites its input in place")


def test_a_size_that_grows_with_the_batch_prints_as_a_formula() -> None:
    sizes = [BatchDimension(1), BatchDimension(2), BatchDimension(1, 3), BatchDimension(2, -1)]
    assert [str(size) for size in sizes] == ["batch", "2*batch", "batch+3", "2*batch+-1"]
    assert [size.at(4) for size in sizes] == [4, 8, 7, 7]


def test_vgg_is_cut_between_the_layers_of_its_features() -> None:
    model, batch, _ = small_model("vgg")
    assert [(cut.after, cut.before) for cut in find_structure(model, batch).cuts][:2] == [("1", "2"), ("2", "3")]


def test_skip_connections_cross_every_cut_they_span() -> None:
    structure = find_structure(UNet(), torch.zeros(4, 1, 8, 8))
    cut = cut_after(structure, "middle")
    assert [(value.module, value.shape) for value in cut.crossing] == [
        ("down1.1", (BATCH, 4, 8, 8)),
        ("middle", (BATCH, 8, 4, 4)),
    ]
    assert cut.bytes_per_sample == 4 * (4 * 8 * 8 + 8 * 4 * 4)
    assert [value.module for value in cut_after(structure, "down1.1").crossing] == ["down1.1"]


def test_a_parent_that_adds_residuals_itself_sends_the_outputs_of_all_blocks() -> None:
    structure = find_structure(ResidualParent(), torch.zeros(4, 8))
    assert [value.module for value in cut_after(structure, "layers.1").crossing] == ["layers.0", "layers.1"]
    assert cut_after(structure, "layers.1").inputs == ("x",)


def test_values_that_depend_on_no_weight_are_recomputed_and_not_sent() -> None:
    pytest.importorskip("transformers")
    batch = {**token_ids(), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    structure = find_structure(transformers_model("LlamaForCausalLM"), batch)
    cut = cut_after(structure, "model.layers.0")
    assert [value.module for value in cut.crossing] == ["model.layers.0"]
    assert cut.inputs == ("attention_mask",)


@pytest.mark.soak
def test_merging_equal_blocks_does_not_change_the_structure() -> None:
    for options in ({}, {"norm": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "tied": False}):
        model = tiny_decoder(layers=7, **options)
        assert find_structure(model, token_batch(4)) == find_structure(model, token_batch(4), merge_equal_blocks=False)
    linears = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))  # whose split groups span blocks
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True)) for _ in range(7)))
    x = torch.zeros(4, 8)
    for chain in (ResidualParent(7), linears, blocks):
        assert find_structure(chain, x) == find_structure(chain, x, merge_equal_blocks=False)


def test_a_model_in_one_piece_says_so() -> None:
    structure = find_structure(nn.Linear(4, 4), torch.zeros(2, 4))
    assert structure.cuts == ()
    assert "one piece" in structure.no_cut_reason


def test_a_module_that_runs_on_both_sides_forbids_the_cut() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(self.a(x).tanh())
            return out

    assert find_structure(Twice(), torch.zeros(2, 4)).no_cut_reason == "no cut between a and a: a runs on both sides"


class SharedActivation(nn.Module):
    """Runs one activation module, which has no weights, after every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def test_a_cut_behind_a_module_that_runs_twice_says_behind_which_call() -> None:
    structure = find_structure(SharedActivation(3), torch.zeros(2, 4))
    assert [(cut.after, cut.call, cut.before) for cut in structure.cuts if cut.after == "activation"] == [
        ("activation", 0, "layers.1"),
        ("activation", 1, "layers.2"),
    ]
    assert [value.call for cut in structure.cuts if cut.after == "activation" for value in cut.crossing] == [0, 1]
    model, x = SharedActivation(7), torch.zeros(2, 4)
    assert find_structure(model, x) == find_structure(model, x, merge_equal_blocks=False)


def test_a_structure_that_could_only_be_found_in_evaluation_says_so() -> None:
    class DropsLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or torch.rand(()) > 0.1:
                    x = layer(x)
            return x

    structure = find_structure(DropsLayers(), torch.zeros(2, 4))
    assert structure.found_in_evaluation
    assert [cut.after for cut in structure.cuts] == ["layers.0", "layers.1"]
    assert not find_structure(SharedActivation(3), torch.zeros(2, 4)).found_in_evaluation


def test_there_is_no_cut_through_what_the_forward_pass_differentiates() -> None:
    class Derivative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.outer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (derivative,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            result: Tensor = self.outer(derivative)
            return result

    structure = find_structure(Derivative(), torch.zeros(2, 4))
    assert [cut.after for cut in structure.cuts] == ["inner.2"]  # the derivative is sent as an argument of `outer`
    assert {no_cut.problem for no_cut in structure.no_cuts} == {"differentiated"}
    whole = find_structure(SolutionNetwork([8, 8]), (torch.zeros(2, 2), torch.zeros(2, 2)))
    assert not whole.cuts
    assert "takes derivatives (torch.autograd.grad) through both sides" in whole.no_cut_reason


def test_a_model_that_needs_the_outputs_of_all_its_blocks_is_traced_with_all_of_them() -> None:
    model = DLRM(rows=8, dim=4, integers=2, categories=6, bottom=[4], top=[4])
    structure = find_structure(model, (torch.zeros(2, 2), torch.zeros(2, 6, dtype=torch.long), torch.zeros(2)))
    assert {f"tables.{number}" for number in range(6)} <= set(structure.pieces)


def test_a_value_that_a_module_passes_on_without_returning_it_forbids_the_cut() -> None:
    class HiddenValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = StoresValue(), UsesStoredValue()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            out: Tensor = self.b(y, self.a)
            return out

    class StoresValue(nn.Linear):
        stored: Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.stored = super().forward(x)
            return self.stored.exp()

    class UsesStoredValue(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor, other: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x) + other.stored

    assert (
        "a passes on a value that it does not return" in find_structure(HiddenValue(), torch.zeros(2, 4)).no_cut_reason
    )


def test_a_batch_that_does_not_fit_names_the_module() -> None:
    with pytest.raises(InputError, match="cannot be traced in conv1"):
        find_structure(small_model("mnist")[0], (torch.zeros(2, 3, 28, 28), torch.zeros(2)))


# ---- the values that cross are all that is needed


Shape = tuple[int | BatchDimension, ...]


class StageBehindCut:
    """Runs the original forward pass with all results from before a cut destroyed, except the values that cross it."""

    def __init__(self, model: nn.Module, batch: Any, structure: Structure) -> None:
        self.model, self.structure = model, structure
        self.inputs = split_batch(batch)
        self.arguments: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        handles = [self._record(name) for name in structure.pieces]
        self.expected = self._run(self.inputs)
        for pair in handles:
            for handle in pair:
                handle.remove()

    def _record(self, name: str) -> tuple[Any, Any]:
        module = self.model.get_submodule(name)

        def before(_: Any, args: Any, kwargs: Any) -> None:
            self.arguments[name] = tree_map(_copied, (args, kwargs))

        def after(_: Any, __: Any, output: Any) -> None:
            self.outputs[name] = tree_map(_copied, output)

        return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)

    def _run(self, inputs: ModelBatch) -> list[Tensor]:
        leaves = tree_leaves(self.model(*inputs.arguments, **inputs.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def outputs_behind(self, cut: Cut) -> list[Tensor]:
        handles = []
        pieces = self.structure.pieces
        for name in pieces[: pieces.index(cut.before)]:
            module = self.model.get_submodule(name)
            received = [value for value in cut.crossing if value.module == name]
            if received or any(True for _ in module.parameters()):
                handles.append(module.register_forward_hook(self._replace_output(name, [v.shape for v in received])))
        for value in cut.crossing:
            for name in value.used_by if value.role == "argument" else ():
                hook = self._replace_arguments(name, value.shape)
                handles.append(self.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        names = _argument_names(self.model, self.inputs)
        arguments = [
            v if name in cut.inputs else _destroyed(v) for name, v in zip(names, self.inputs.arguments, strict=False)
        ]
        keywords = {name: v if name in cut.inputs else _destroyed(v) for name, v in self.inputs.keywords.items()}
        try:
            return self._run(ModelBatch(tuple(arguments), keywords, None))
        finally:
            for handle in handles:
                handle.remove()

    def _replace_output(self, name: str, shapes: list[Shape]) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return tree_map(lambda leaf: leaf if _has_shape(leaf, shapes) else _destroyed(leaf), self.outputs[name])

        return hook

    def _replace_arguments(self, name: str, shape: Shape) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            leaves, tree = tree_flatten((args, kwargs))
            recorded = tree_leaves(self.arguments[name])
            merged = [r if _has_shape(r, [shape]) else leaf for leaf, r in zip(leaves, recorded, strict=True)]
            return tree_unflatten(merged, tree)

        return hook


def _argument_names(model: nn.Module, inputs: ModelBatch) -> list[str]:
    return list(inspect.signature(model.forward).parameters)[: len(inputs.arguments)]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _has_shape(leaf: Any, shapes: list[Shape]) -> bool:
    sizes = [tuple(size if isinstance(size, int) else size.at(SAMPLES) for size in shape) for shape in shapes]
    return isinstance(leaf, Tensor) and tuple(leaf.shape) in sizes


def _destroyed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.full_like(leaf, float("nan")) if leaf.is_floating_point() else torch.zeros_like(leaf)


def model_and_batch(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    builders: dict[str, Any] = {
        "unet": lambda: (UNet(), torch.randn(4, 1, 8, 8)),
        "residual": lambda: (ResidualParent(), torch.randn(4, 8)),
        "towers": lambda: (TwoTowers(head=True), (torch.arange(4), torch.arange(4), torch.zeros(4))),
        "tasks": lambda: (MultiTask(), torch.randn(4, 6)),
        "deep": lambda: (tiny_decoder(layers=6), token_batch(4)),
    }
    if name in builders:
        built: tuple[nn.Module, Any] = builders[name]()
        return built
    if name[0].isupper():
        return transformers_model(name), token_ids()
    model, batch, _ = small_model(name)
    return model, batch


MODELS = ("gpt", "llama", "encoder", "resnet18", "vgg", "mnist", "unet", "residual", "towers", "tasks", "deep")
TRANSFORMERS_MODELS = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "DebertaV2ForMaskedLM")


@pytest.mark.parametrize(
    "name", all_but({*MODELS} - {"resnet18", "vgg"} | {"GPT2LMHeadModel"}, [*MODELS, *TRANSFORMERS_MODELS])
)
def test_the_values_that_cross_a_cut_are_all_that_the_rest_needs(name: str) -> None:
    if name in TRANSFORMERS_MODELS:
        pytest.importorskip("transformers")
    model, batch = model_and_batch(name)
    model.eval()
    structure = find_structure(model, batch)
    stage = StageBehindCut(model, batch, structure)
    assert structure.cuts
    assert all(torch.isfinite(leaf).all() for leaf in stage.expected)
    for cut in structure.cuts:
        for output, expected in zip(stage.outputs_behind(cut), stage.expected, strict=True):
            assert torch.allclose(output, expected, rtol=1e-4, atol=1e-5), f"{cut.after} | {cut.before}"


def test_the_previous_test_fails_without_one_of_the_values() -> None:
    model, batch = model_and_batch("unet")
    structure = find_structure(model, batch)
    cut = cut_after(structure, "middle")
    (output,) = StageBehindCut(model, batch, structure).outputs_behind(Cut(cut.after, cut.before, cut.crossing[1:]))
    assert not torch.isfinite(output).all()


def test_gpt3_is_cut_between_all_its_blocks_and_split_by_heads() -> None:
    with torch.device("meta"):
        model = Decoder(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=50257)
        sample = torch.empty(2, 2048, dtype=torch.long)
    structure = find_structure(model, (sample, sample))
    assert (
        len([cut for cut in structure.cuts if cut.after.startswith("blocks.") and cut.before.startswith("blocks.")])
        == 95
    )
    assert len([group for group in structure.splits if group.heads == 96]) == 96
