"""The session of a job: where its initial weights are computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.files.weights_file import WeightsFiles
from meshwright.job import Job, load_job
from meshwright.parallel.weights.layout import local_tensor
from meshwright.plan import Plan
from meshwright.train import job_session
from meshwright.train.build import build_data, build_initialized_model
from meshwright.zoo.huggingface import build
from meshwright.zoo.job_text import job_text
from tests.ranks import ranks
from tests.soaked import all_but
from tests.train.one_process import equal_states, toy_job, world
from tests.zoo_models.configs import write_config

DECODER = {
    "call": "meshwright.workloads.text.decoder_sizes:decoder",
    "size": "gpt2",
    "layers": 2,
    "hidden": 16,
    "heads": 2,
}


def decoder_job(**train: Any) -> Job:
    tokens = {"call": "meshwright.workloads.text.tokens:tokens", "sequence": 8, "vocabulary": 40, "samples": 16}
    return toy_job(
        model={**DECODER, "vocabulary": 40, "sequence": 8},
        data={"train": {**tokens, "split": "train"}},
        loss={"call": "meshwright.workloads.text.decoder:NextTokenLoss"},
        train={"global_batch": 8, "freeze": ["blocks.0.norm1"], **train},
    )


def plan_of(axes: dict[str, int]) -> Plan:
    stages = {"pipeline": {"cuts": ["blocks.0"], "microbatches": 2}} if "pipeline" in axes else {}
    return Plan.model_validate({"axes": axes, **stages})


def initial_weights(rank: int, size: int, axes: dict[str, int], on_meta: bool) -> tuple[bool, dict[str, Tensor]]:
    """Whether the model began on the meta device, and its weights after two steps."""
    job, plan = decoder_job(), plan_of(axes)
    limit, job_session.LARGE_BYTES = job_session.LARGE_BYTES, 0 if on_meta else 2**30
    try:
        model, fill = job_session._build_model(job, plan, torch.device("cpu"))
        session = job_session.build_session(job, plan, world(rank, size), lambda doing: None)
    finally:
        job_session.LARGE_BYTES = limit
    for batch in session.batches(build_data(job)[0], 1, 8):
        session.step(batch)
    empty = fill is not None and all(p.is_meta for p in model.parameters())
    return empty, session.state_dict()


def test_a_job_trains_with_its_loss_in_chunks() -> None:
    """The head is found with a batch, which other plans of this job do not need."""
    job = decoder_job()
    states = []
    for chunks in (1, 2):
        plan = Plan.model_validate({"compute": {"loss_chunks": chunks}})
        session = job_session.build_session(job, plan, world(0, 1), lambda doing: None)
        for batch in session.batches(build_data(job)[0], 1, 8):
            session.step(batch)
        states.append(session.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)


@pytest.mark.parametrize("axis", all_but({"pipeline"}, ["shard", "tensor", "pipeline"]))
def test_a_large_model_that_is_divided_is_built_on_the_meta_device(axis: str) -> None:
    with ranks(2) as two:
        filled, built = two.run(initial_weights, {axis: 2}, True), two.run(initial_weights, {axis: 2}, False)
    for (empty, weights), (_, expected) in zip(filled, built, strict=True):
        assert empty
        assert equal_states(weights, expected)


def write_folder(folder: Path, state: dict[str, Tensor]) -> None:
    """Writes the weights into two files with an index, as Hugging Face's libraries do it. A tied weight is written
    under its first name only."""
    first_names = {value.data_ptr(): name for name, value in reversed(state.items())}
    state = {name: value for name, value in state.items() if first_names[value.data_ptr()] == name}
    names = list(state)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pretrained_weights(rank: int, size: int, job: Job, plan: Plan) -> tuple[int, int, dict[str, Tensor]]:
    """Returns the bytes that were read from the folder, the bytes of the weights that this rank has, and the whole
    model's weights."""
    read_bytes: list[int] = []
    read_region = WeightsFiles.read_region

    def counting(self: WeightsFiles, *arguments: Any) -> Tensor:
        tensor = read_region(self, *arguments)
        read_bytes.append(tensor.nbytes)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_session, "LARGE_BYTES", 0)
        patch.setattr(WeightsFiles, "read_region", counting)
        session = job_session.build_session(job, plan, world(rank, size), lambda doing: None)
    held = [local_tensor(parameter).nbytes for parameter in session.module.parameters()]
    return sum(read_bytes), sum(held), session.state_dict()


@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
def test_a_rank_reads_its_part_of_pretrained_weights_only(axis: str, tmp_path: Path) -> None:
    state = build_initialized_model(decoder_job(seed=9)).state_dict()
    write_folder(tmp_path, state)
    whole, job = sum(value.nbytes for value in state.values()), decoder_job(weights=str(tmp_path))
    with ranks(2) as two:
        for read, held, weights in two.run(pretrained_weights, job, plan_of({axis: 2})):
            assert equal_states(weights, state)
            assert read == held < 0.9 * whole


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["shard", "tensor", "pipeline"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_models_of_transformers_are_filled_from_their_folders(name: str, axis: str, tmp_path: Path) -> None:
    model: Any = build(str(write_config(tmp_path, name)))
    model.save_pretrained(str(tmp_path / "saved"))
    samples = ["data.train.samples=4", "data.eval.samples=2", "train.global_batch=4"]
    job = load_job("job", samples, job_text(f"hf:{tmp_path / 'saved'}"))
    stages = {"pipeline": {"cuts": ["model.layers.0"], "microbatches": 2}} if axis == "pipeline" else {}
    plan = Plan.model_validate({"axes": {axis: 2}, **stages})
    with ranks(2) as two:
        for read, held, weights in two.run(pretrained_weights, job, plan):
            assert equal_states(weights, model.state_dict())
            assert name == "mixtral" or read == held  # experts are stored one by one, and stacked before they are split
