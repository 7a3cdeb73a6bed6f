"""Pretrained weights: which tensor of the files belongs to which parameter of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.files.weights_file import open_weights
from meshwright.parallel.weights.pretrained import load_pretrained, match_tensors
from meshwright.zoo.huggingface import build as build_model
from tests.zoo_models.configs import write_config


class Base(nn.Module):
    """Has the attributes of a model of transformers that matter for names."""

    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = (r"pooler",)
    _keys_to_ignore_on_load_missing = (r"scale$",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("frequencies", torch.ones(2), persistent=False)


class WithHead(nn.Module):
    """A model with a base model and a head, whose weight is tied to the embedding."""

    base_model_prefix = "model"
    _keys_to_ignore_on_load_unexpected = (r"pooler",)
    _keys_to_ignore_on_load_missing = (r"scale$",)

    def __init__(self) -> None:
        super().__init__()
        self.model = Base()
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.model.embedding.weight


def build(config: str) -> Any:
    return build_model(config)


def load(model: nn.Module, folder: Path, state: dict[str, Tensor], skip: tuple[str, ...] = ()) -> None:
    save_file(state, folder / "model.safetensors")
    files = open_weights(folder)
    load_pretrained(model, match_tensors(model, files, lambda name: name in skip))


@pytest.mark.parametrize("name", ["model.embedding.weight", "embedding.weight", "head.weight"])
def test_a_tied_weight_is_loaded_from_any_of_its_names_with_and_without_the_prefix(tmp_path: Path, name: str) -> None:
    model, value = WithHead(), torch.randn(5, 3).bfloat16()
    load(model, tmp_path, {name: value})
    assert torch.equal(model.model.embedding.weight, value.float())
    assert model.head.weight is model.model.embedding.weight


def test_a_base_model_is_loaded_from_the_files_of_a_model_with_a_head(tmp_path: Path) -> None:
    model, value = Base(), torch.randn(5, 3)
    load(model, tmp_path, {"model.embedding.weight": value, "head.weight": value.clone()}, skip=("head.weight",))
    assert torch.equal(model.embedding.weight, value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_numbers_of_another_kind_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match=rf"embedding.weight is {dtype} in .*, but torch.float32 in the model"):
        load(Base(), tmp_path, {"embedding.weight": torch.zeros(5, 3, dtype=dtype)})


def test_what_the_class_computes_or_does_not_need_may_be_in_the_files(tmp_path: Path) -> None:
    names = ("model.pooler.weight", "model.frequencies", "layers.0.rotary_emb.inv_freq", "model.position_ids")
    model, value = WithHead(), torch.randn(5, 3)
    load(model, tmp_path, {"model.embedding.weight": value, **{name: torch.zeros(2) for name in names}})
    assert torch.equal(model.model.embedding.weight, value)
    buffers = dict(model.model.named_buffers())
    assert torch.equal(buffers["scale"], torch.ones(2))
    assert torch.equal(buffers["frequencies"], torch.ones(2))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"model.scale": torch.zeros(2)}, "has no model.embedding.weight"),
        ({"embedding.weight": torch.zeros(5, 4)}, "model.embedding.weight is (5, 4) in"),
        ({"embedding.weight": torch.zeros(5, 3), "tail": torch.zeros(1)}, "holds tail, which the model does not have"),
    ],
)
def test_weights_of_another_model_are_refused(tmp_path: Path, state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError) as refusal:
        load(WithHead(), tmp_path, state)
    assert message in str(refusal.value)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "whisper", "mixtral"])
def test_models_of_transformers_get_the_weights_that_were_saved(tmp_path: Path, name: str) -> None:
    """The files of ViT have other names than the model, and those of Mixtral have the experts one by one."""
    config = str(write_config(tmp_path, name))
    saved, model = build(config), build(config)
    saved.save_pretrained(str(tmp_path / "saved"), max_shard_size="20KB")
    pretrained = match_tensors(model, open_weights(tmp_path / "saved"), lambda name: False)
    load_pretrained(model, pretrained)
    expected = saved.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key]), key
    for key, tensor in pretrained.items():
        first_half = (tensor.shape[0] // 2, *tensor.shape[1:])
        part = tensor.read_region((0,) * len(tensor.shape), first_half)
        assert torch.equal(part, expected[key][: tensor.shape[0] // 2]), key


def test_experts_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    saved = build(str(write_config(tmp_path, "mixtral")))
    saved.save_pretrained(str(tmp_path / "saved"))
    file = tmp_path / "saved" / "model.safetensors"
    state = load_file(file)
    name = next(name for name in state if name.endswith("experts.1.w1.weight"))
    save_file({**state, name: torch.zeros(3, 3)}, file)
    with pytest.raises(InputError, match="transformers cannot make") as refusal:
        match_tensors(saved, open_weights(tmp_path / "saved"), lambda name: False)
    assert "\n" not in str(refusal.value)
