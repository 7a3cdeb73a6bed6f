"""Cuts lie between modules, and what is said to cross a cut is all that the rest of the model needs: with everything
else that was computed before it destroyed, the original forward pass still gives the model's output."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from meshwright.batch import Example, split
from meshwright.call import load
from meshwright.errors import InputError
from meshwright.profile.structure.cuts import Cut
from meshwright.profile.structure.structure import Structure, structure
from meshwright.workloads.text.decoder import Decoder
from tests.profile.models import make, tiny_decoder, tokens
from tests.profile.structure.structured import MultiTask, ResidualParent, TwoTowers, UNet, ids, transformer


def cut_after(found: Structure, module: str) -> Cut:
    return next(cut for cut in found.cuts if cut.after == module)


# ---- what is found


def test_a_decoder_is_cut_between_blocks_and_one_value_crosses() -> None:
    found = structure(tiny_decoder(), tokens(4))
    cut = cut_after(found, "blocks.0")
    assert cut.before == "blocks.1"
    (value,) = cut.crossing
    assert (value.module, value.role, value.used_by) == ("blocks.0", "output", ("blocks.1",))
    assert (value.shape, value.dtype, value.bytes_per_sample) == (("batch", 16, 32), "float32", 16 * 32 * 4)
    assert cut.shared == ("embedding.weight",)  # the head uses it again
    assert found.ties[0].modules == ("embedding", "head")
    assert not any("attention" in cut.after or "feedforward" in cut.after for cut in found.cuts)


def test_resnet50_is_cut_between_its_bottlenecks() -> None:
    with torch.device("meta"):
        model = load("torchvision.models.resnet50")()
        sample = (torch.empty(2, 3, 64, 64), torch.empty(2, dtype=torch.long))
    found = structure(model, sample)
    between = [cut for cut in found.cuts if cut.after.startswith("layer") and cut.before.startswith("layer")]
    assert len(between) == 15  # of 16
    assert all(len(cut.crossing) == 1 for cut in found.cuts)
    assert found.pieces[:5] == ("conv1", "bn1", "relu", "maxpool", "layer1.0")
    (refused,) = found.no_cuts
    assert (refused.before, refused.reason) == ("relu", "relu overwrites its input in place")


def test_vgg_is_cut_between_the_layers_of_its_features() -> None:
    model, batch, _ = make("vgg")
    assert [(cut.after, cut.before) for cut in structure(model, batch).cuts][:2] == [("1", "2"), ("2", "3")]


def test_skip_connections_cross_every_cut_they_span() -> None:
    found = structure(UNet(), torch.zeros(4, 1, 8, 8))
    cut = cut_after(found, "middle")
    assert [(value.module, value.shape) for value in cut.crossing] == [
        ("down1.1", ("batch", 4, 8, 8)),
        ("middle", ("batch", 8, 4, 4)),
    ]
    assert cut.bytes_per_sample == 4 * (4 * 8 * 8 + 8 * 4 * 4)
    assert [value.module for value in cut_after(found, "down1.1").crossing] == ["down1.1"]


def test_a_parent_that_adds_residuals_itself_sends_all_it_added() -> None:
    found = structure(ResidualParent(), torch.zeros(4, 8))
    assert [value.module for value in cut_after(found, "layers.1").crossing] == ["layers.0", "layers.1"]
    assert cut_after(found, "layers.1").inputs == ("x",)


def test_values_without_weights_are_computed_again_and_not_sent() -> None:
    pytest.importorskip("transformers")
    batch = {**ids(), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    found = structure(transformer("LlamaForCausalLM"), batch)
    cut = cut_after(found, "model.layers.0")
    assert [value.module for value in cut.crossing] == ["model.layers.0"]
    assert cut.inputs == ("attention_mask",)


def test_equal_blocks_traced_once_have_the_structure_of_all() -> None:
    for options in ({}, {"norm": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "tied": False}):
        model = tiny_decoder(layers=7, **options)
        assert structure(model, tokens(4)) == structure(model, tokens(4), repeats=False)
    rows = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))  # whose groups span blocks
    steps = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(True)) for _ in range(7)))
    for chain in (ResidualParent(7), rows, steps):
        assert structure(chain, torch.zeros(4, 8)) == structure(chain, torch.zeros(4, 8), repeats=False)


def test_a_model_in_one_piece_says_so() -> None:
    found = structure(nn.Linear(4, 4), torch.zeros(2, 4))
    assert found.cuts == ()
    assert "one piece" in found.reason


def test_a_module_that_runs_on_both_sides_forbids_the_cut() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.a(self.a(x).tanh())
            return out

    assert structure(Twice(), torch.zeros(2, 4)).reason == "no cut between a and a: a runs on both sides"


class Shared(nn.Module):
    """Runs one activation, which has no weights, behind every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.activation = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def test_a_cut_behind_a_module_that_runs_twice_says_behind_which_call() -> None:
    found = structure(Shared(3), torch.zeros(2, 4))
    assert [(cut.after, cut.call, cut.before) for cut in found.cuts if cut.after == "activation"] == [
        ("activation", 0, "layers.1"),
        ("activation", 1, "layers.2"),
    ]
    assert [value.call for cut in found.cuts if cut.after == "activation" for value in cut.crossing] == [0, 1]
    assert structure(Shared(7), torch.zeros(2, 4)) == structure(Shared(7), torch.zeros(2, 4), repeats=False)


def test_what_could_only_be_found_in_evaluation_says_so() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not self.training or torch.rand(()) > 0.1:
                    x = layer(x)
            return x

    found = structure(Dropping(), torch.zeros(2, 4))
    assert found.evaluated
    assert [cut.after for cut in found.cuts] == ["layers.0", "layers.1"]
    assert not structure(Shared(3), torch.zeros(2, 4)).evaluated


def test_a_value_handed_on_behind_the_forward_pass_forbids_the_cut() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Remembers(), Recalls()

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            out: Tensor = self.b(y, self.a)
            return out

    class Remembers(nn.Linear):
        kept: Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = super().forward(x)
            return self.kept.exp()

    class Recalls(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)

        def forward(self, x: Tensor, memory: Any) -> Tensor:  # type: ignore[override]
            return super().forward(x) + memory.kept

    assert "a hands on a value that it does not return" in structure(Hides(), torch.zeros(2, 4)).reason


def test_a_batch_that_does_not_fit_is_one_clear_line() -> None:
    with pytest.raises(InputError, match="cannot be traced in conv1"):
        structure(make("mnist")[0], (torch.zeros(2, 3, 28, 28), torch.zeros(2)))


# ---- what crosses is all that is needed


class Stage:
    """Runs the original forward pass from a cut on, with everything before it destroyed but what crosses."""

    def __init__(self, model: nn.Module, batch: Any, found: Structure) -> None:
        self.model, self.found = model, found
        self.example = split(batch)
        self.arguments: dict[str, Any] = {}
        self.outputs: dict[str, Any] = {}
        handles = [self._watch(name) for name in found.pieces]
        self.whole = self._run(self.example)
        for pair in handles:
            for handle in pair:
                handle.remove()

    def _watch(self, name: str) -> tuple[Any, Any]:
        module = self.model.get_submodule(name)

        def before(_: Any, args: Any, kwargs: Any) -> None:
            self.arguments[name] = tree_map(_copied, (args, kwargs))

        def after(_: Any, __: Any, output: Any) -> None:
            self.outputs[name] = tree_map(_copied, output)

        return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)

    def _run(self, example: Example) -> list[Tensor]:
        found = tree_leaves(self.model(*example.arguments, **example.keywords))
        return [leaf for leaf in found if isinstance(leaf, Tensor)]

    def behind(self, cut: Cut) -> list[Tensor]:
        handles = []
        early = self.found.pieces[: self.found.pieces.index(cut.before)]
        for name in early:
            module = self.model.get_submodule(name)
            received = [value for value in cut.crossing if value.module == name]
            if received or any(True for _ in module.parameters()):
                handles.append(module.register_forward_hook(self._replaced(name, [v.shape for v in received])))
        for value in cut.crossing:
            for name in value.used_by if value.role == "argument" else ():
                hook = self._injected(name, value.shape)
                handles.append(self.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        keep = set(cut.inputs)
        names = list(_names(self.model, self.example))
        arguments = [
            v if name in keep else _destroyed(v) for name, v in zip(names, self.example.arguments, strict=False)
        ]
        keywords = {name: v if name in keep else _destroyed(v) for name, v in self.example.keywords.items()}
        try:
            return self._run(Example(tuple(arguments), keywords, None))
        finally:
            for handle in handles:
                handle.remove()

    def _replaced(self, name: str, shapes: list[tuple[int | str, ...]]) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            return tree_map(lambda leaf: leaf if _fits(leaf, shapes) else _destroyed(leaf), self.outputs[name])

        return hook

    def _injected(self, name: str, shape: tuple[int | str, ...]) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> Any:
            given, tree = tree_flatten((args, kwargs))
            right = tree_leaves(self.arguments[name])
            merged = [r if _fits(r, [shape]) else g for g, r in zip(given, right, strict=True)]
            return tree_unflatten(merged, tree)

        return hook


def _names(model: nn.Module, example: Example) -> list[str]:
    return list(inspect.signature(model.forward).parameters)[: len(example.arguments)]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _fits(leaf: Any, shapes: list[tuple[int | str, ...]]) -> bool:
    sizes = [tuple(4 if size == "batch" else size for size in shape) for shape in shapes]
    return isinstance(leaf, Tensor) and tuple(leaf.shape) in sizes


def _destroyed(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.full_like(leaf, float("nan")) if leaf.is_floating_point() else torch.zeros_like(leaf)


def prepared(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    pairs: dict[str, Any] = {
        "unet": lambda: (UNet(), torch.randn(4, 1, 8, 8)),
        "residual": lambda: (ResidualParent(), torch.randn(4, 8)),
        "towers": lambda: (TwoTowers(head=True), (torch.arange(4), torch.arange(4), torch.zeros(4))),
        "tasks": lambda: (MultiTask(), torch.randn(4, 6)),
        "deep": lambda: (tiny_decoder(layers=6), tokens(4)),
    }
    if name in pairs:
        made: tuple[nn.Module, Any] = pairs[name]()
        return made
    if name[0].isupper():
        return transformer(name), ids()
    model, batch, _ = make(name)
    return model, batch


HERE = ("gpt", "llama", "encoder", "resnet18", "vgg", "mnist", "unet", "residual", "towers", "tasks", "deep")
THERE = ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "DebertaV2ForMaskedLM")


@pytest.mark.parametrize("name", [*HERE, *THERE])
def test_what_crosses_a_cut_is_all_that_the_rest_needs(name: str) -> None:
    if name in THERE:
        pytest.importorskip("transformers")
    model, batch = prepared(name)
    model.eval()
    found = structure(model, batch)
    stage = Stage(model, batch, found)
    assert found.cuts
    assert all(torch.isfinite(leaf).all() for leaf in stage.whole)
    for cut in found.cuts:
        for got, right in zip(stage.behind(cut), stage.whole, strict=True):
            assert torch.allclose(got, right, rtol=1e-4, atol=1e-5), f"{cut.after} | {cut.before}"


def test_the_check_notices_a_missing_value() -> None:
    model, batch = prepared("unet")
    found = structure(model, batch)
    cut = cut_after(found, "middle")
    (got,) = Stage(model, batch, found).behind(Cut(cut.after, cut.before, cut.crossing[1:]))
    assert not torch.isfinite(got).all()


def test_gpt3_is_understood_in_blocks() -> None:
    with torch.device("meta"):
        model = Decoder(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=50257)
        sample = torch.empty(2, 2048, dtype=torch.long)
    found = structure(model, (sample, sample))
    assert (
        len([cut for cut in found.cuts if cut.after.startswith("blocks.") and cut.before.startswith("blocks.")]) == 95
    )
    assert len([group for group in found.splits if group.heads == 96]) == 96
