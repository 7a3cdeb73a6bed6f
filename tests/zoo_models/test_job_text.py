"""The job that is written for the name of a model has a model, data and loss that fit each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.model_io.batch import split_batch
from meshwright.train.build import build_data, construct_model, sample_batch
from meshwright.user.call import bind
from meshwright.workloads.text.token_build import build_tokens
from meshwright.zoo.job_text import job_text
from tests.zoo_models.configs import CONFIGS, write_config


def job_of(name: str, **sizes: int) -> Job:
    return load_job(name, text=job_text(name, **sizes))


def losses(job: Job, steps: int) -> list[float]:
    """Returns the losses of a few steps of plain PyTorch on the first samples."""
    torch.manual_seed(0)
    model, (training_set, evaluation_set) = construct_model(job), build_data(job)
    assert {len(dataset) > 0 for dataset in (training_set, evaluation_set)} == {True}
    batch = sample_batch(job, training_set)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = []
    for _ in range(steps):
        loss = _loss(job, model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def _loss(job: Job, model: Any, batch: Any) -> Tensor:
    if job.loss is None:
        result: Tensor = model(**batch).loss
        return result
    inputs = split_batch(batch)
    scores: Tensor = bind(job.loss, "loss")(model(*inputs.arguments), inputs.target)
    return scores


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_model_of_transformers_learns_from_its_generated_data(tmp_path: Path, name: str) -> None:
    job = job_of(f"hf:{write_config(tmp_path, name)}", **({"sequence": 8} if name == "t5" else {}))
    assert job.loss is None
    first, *_, last = losses(job, 8)
    assert last < first


@pytest.mark.parametrize("name", ["timm:test_resnet", "timm:test_vit", "torchvision:squeezenet1_1"])
def test_models_for_pictures_learn_from_generated_pictures(name: str) -> None:
    job = job_of(name, **({"image": 32} if "vit" not in name else {}))
    first, *_, last = losses(job, 8)
    assert last < first


@pytest.mark.parametrize(
    ("name", "sizes", "model", "data"),
    [
        ("timm:vit_base_patch16_224", {}, {"num_classes": 1000}, {"size": 224, "classes": 1000}),
        ("timm:vit_base_patch16_224", {"image": 384}, {"img_size": 384}, {"size": 384}),
        ("timm:resnet50", {"image": 64}, {"model_name": "resnet50"}, {"size": 64}),
        ("torchvision:resnet50", {}, {"num_classes": 1000}, {"size": 224, "classes": 1000}),
        ("torchvision:vit_b_16", {"image": 384}, {"image_size": 384}, {"size": 384}),
        ("torchvision:inception_v3", {}, {"aux_logits": False}, {"size": 299}),
        ("hf:llama", {"sequence": 4096}, {"config": "llama"}, {"sequence": 4096, "vocabulary": 32000}),
        ("hf:bert", {}, {"config": "bert"}, {"sequence": 512, "vocabulary": 30522}),
        ("hf:t5", {}, {"config": "t5"}, {"sequence": 512}),
        ("hf:whisper", {}, {"config": "whisper"}, {"bands": 80, "frames": 3000, "sequence": 448}),
        ("hf:vit", {}, {"config": "vit"}, {"size": 224, "classes": 2, "channels": 3}),
    ],
)
def test_sizes_are_those_of_the_model_or_of_the_options(
    name: str, sizes: dict[str, int], model: dict[str, Any], data: dict[str, Any]
) -> None:
    job = job_of(name, global_batch=512, **sizes)
    assert model.items() <= job.model.arguments.items()
    assert data.items() <= job.data.train.arguments.items()
    assert job.train.global_batch == 512


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("hf:", {}, "hf:: write the model after the colon, such as hf:llama or hf:FOLDER"),
        ("timm:resnet5O", {}, r"timm:resnet5O: there is no such model: did you mean 'resnet50'\?"),
        ("timm:hf_hub:timm/resnet50", {}, "there is no such model"),
        ("torchvision:resnet5O", {}, "there is no such image classifier"),
        ("timm:resnet50", {"sequence": 8}, "--sequence 8: timm:resnet50 takes pictures: use --image"),
        ("hf:vit", {"sequence": 8}, "--sequence 8: ViTForImageClassification .* has no such size"),
        ("hf:gpt2", {"image": 8}, "--image 8: GPT2LMHeadModel .* has no such size"),
        ("hf:gpt2", {"sequence": 2048}, "--sequence 2048: the model has 1024 positions"),
        ("hf:whisper", {"sequence": 449}, "--sequence 449: the model has 448 positions"),
        ("hf:vit", {"image": 384}, "--image 384: image_size in the model's config is 224"),
        ("hf:speech_to_text", {}, "of the models for speech recognition only whisper has generated data"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        job_text(name, **sizes)


def test_a_path_with_odd_characters_is_read_back(tmp_path: Path) -> None:
    odd = tmp_path / 'a "b": {c}, #d é'
    odd.mkdir()
    folder = write_config(odd, "llama")
    assert job_of(f"hf:{folder}").model.arguments == {"config": str(folder / "config.json")}


def test_a_job_starts_from_the_weights_of_the_folder_if_it_has_any(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama")
    assert job_of(f"hf:{folder}").train.weights is None
    (folder / "model.safetensors").touch()
    text = job_text(f"hf:{folder}")
    assert "with the weights of its folder" in text.replace("\n# ", " ")
    weights = load_job("job", text=text).train.weights
    assert weights is not None
    assert weights.path == str(folder)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_language_models_read_token_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be\n" * 20)
    build_tokens(tmp_path / "texts", tmp_path / "tokens", validation=0)
    text = job_text(f"hf:{write_config(tmp_path, name, vocab_size=300)}")
    root = [f"data.root={tmp_path / 'tokens'}", "data.synthetic=false", "data.eval=null"]
    torch.manual_seed(0)
    sample = build_data(load_job("job", root, text))[0][0]
    assert set(sample) == {"input_ids", "attention_mask", "labels"}
    assert (sample["attention_mask"] == 1).all()
    if name == "llama":
        assert bytes(sample["labels"].tolist()) == b"to be or not to "
        assert torch.equal(sample["labels"], sample["input_ids"])
    else:
        hidden = sample["labels"] != -100
        assert 0 < hidden.sum() < 10
        assert bytes(torch.where(hidden, sample["labels"], sample["input_ids"]).tolist()) == b"to be or not to "


def test_data_of_which_there_is_no_reader_is_refused_without_synthetic(tmp_path: Path) -> None:
    for name in ("t5", "whisper", "bert_classes"):
        job = load_job("job", ["data.synthetic=false"], job_text(f"hf:{write_config(tmp_path, name)}"))
        with pytest.raises(InputError, match=r"has generated samples only: set data\.synthetic to true"):
            build_data(job)


def test_detectors_are_refused_with_the_reason() -> None:
    words = "a detector computes depends on the boxes in its images, so it cannot be planned: write a job"
    with pytest.raises(InputError, match=words):
        job_text("torchvision:fasterrcnn_resnet50_fpn")
