"""Models of transformers are built from a config alone: without weights, the network, or code that comes with them."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.zoo.huggingface import KINDS, build, read_config, training_kind
from tests.zoo_models.configs import write_config


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_the_class_in_architectures_is_built_with_random_fp32_weights(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    for config in (folder, folder / "config.json"):
        with torch.device("meta"):
            model = build(str(config))
        assert type(model).__name__ == "LlamaForCausalLM"
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # although the config says bf16
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("model_type", "class_name", "kind"),
    [
        ("llama", "LlamaForCausalLM", "causal language model"),
        ("gpt2", "GPT2LMHeadModel", "causal language model"),
        ("bert", "BertForMaskedLM", "masked language model"),
        ("t5", "T5ForConditionalGeneration", "sequence to sequence"),
        ("bart", "BartForConditionalGeneration", "sequence to sequence"),
        ("vit", "ViTForImageClassification", "image classification"),
        ("whisper", "WhisperForConditionalGeneration", "speech recognition"),
    ],
)
def test_a_model_type_is_trained_for_what_it_is_made_for(model_type: str, class_name: str, kind: str) -> None:
    training = training_kind(read_config(model_type), model_type)
    assert (training.class_name, training.kind) == (class_name, kind)
    assert kind in KINDS


def test_fields_of_the_config_are_changed(tmp_path: Path) -> None:
    folder = str(write_config(tmp_path, "mixtral"))
    model: Any = build(folder, num_hidden_layers=1, experts_implementation="eager")
    assert len(model.model.layers) == 1
    assert model.config._experts_implementation == "eager"
    with pytest.raises(InputError, match=r"has no 'num_hidden_layer': did you mean 'num_hidden_layers'\?"):
        build(folder, num_hidden_layer=1)


def test_code_that_comes_with_a_model_is_never_executed(tmp_path: Path) -> None:
    code = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    folder = write_config(tmp_path, "llama", auto_map=code)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    assert type(build(str(folder))).__name__ == "LlamaForCausalLM"
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": code}))
    with pytest.raises(InputError, match=r"model_type is 'mine', .* code that comes with a model is never executed"):
        build(str(folder))
    assert not (tmp_path / "executed").exists()


def test_kernels_that_a_config_names_are_not_downloaded(tmp_path: Path) -> None:
    kernels = {"attn_implementation": "kernels-community/other", "_experts_implementation": "other/kernel"}
    config = read_config(str(write_config(tmp_path, "llama", **kernels)))
    assert not config._attn_implementation
    assert config._experts_implementation != "other/kernel"
    eager = read_config(str(write_config(tmp_path, "gpt2", attn_implementation="eager")))
    assert eager._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            "meta-llama/Llama-3.1-8B",
            "nothing is downloaded: download the model's config.json first",
        ),
        ("none/config.json", "there is no such folder with config.json"),
        ("lama", r"neither a folder with config.json nor a model type of transformers: did you mean 'llama'\?"),
        ("clip_text_model", "model_type is clip_text_model, and it has no class for speech recognition, "),
    ],
)
def test_what_is_not_here_is_refused(config: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(config)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a config"),
        ("{}", "model_type is None"),
        ('{"model_type": "llama", "architectures": ["LlamaConfig"]}', "'LlamaConfig', which is no class of a model"),
        ('{"model_type": "llama", "architectures": ["LlamaForImages"]}', "LlamaForImages"),
        ('{"model_type": "llama", "architectures": ["os.system"]}', "'os.system', which is no class of a model"),
        (
            '{"model_type": "llama", "architectures": ["BertForTokenClassification"]}',
            "BertForTokenClassification, whose config is a BertConfig, but model_type is llama",
        ),
        ('{"model_type": "llama", "hidden_size": "x"}', "hidden_size"),
        (
            '{"model_type": "llama", "architectures": {"0": "LlamaForCausalLM"}}',
            "write a list with the name",
        ),
        ('{"model_type": "llama", "num_hidden_layers": 10000000}', "num_hidden_layers is 10000000: at most 10000"),
        (
            '{"model_type": "timm_wrapper", "architecture": "hf-hub:other/model"}',
            "architecture is 'hf-hub:other/model",
        ),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        build(str(tmp_path))


@pytest.mark.parametrize("class_name", ["DistilBertForTokenClassification", "DistilBertModel"])
def test_classes_without_generated_data_are_built_for_jobs_with_data_of_their_own(
    tmp_path: Path, class_name: str
) -> None:
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "vocab_size": 20}
    config = {"model_type": "distilbert", "architectures": [class_name], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(build(str(tmp_path))).__name__ == class_name
    words = rf"architectures is {class_name}, for which no data can be generated here: write a job with your own data"
    with pytest.raises(InputError, match=words):
        training_kind(read_config(str(tmp_path)), str(tmp_path))
