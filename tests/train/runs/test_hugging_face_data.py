"""Jobs and loops on data sets of Hugging Face's `datasets`: the same training on any number of ranks, also if it is
stopped and resumed."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.data.loading import LoadingOptions, SampleShare, train_batches
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.session import Session
from meshwright.user.call import load
from tests.auto.machines import cpu_cluster
from tests.ranks import RankPool
from tests.train.loops.test_readme import code_blocks
from tests.train.one_process import session_of, toy_job, train

HERE = "tests.train.runs.test_hugging_face_data"
SIZE, BATCH = 22, 5  # the last batch is short


def rows(kind: str = "stream", size: int = SIZE, seed: int | None = 0, tensors: bool = True) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(size, 20, generator=generator)
    columns = {"x": inputs.tolist(), "label": inputs[:, :5].argmax(dim=1).tolist()}
    made = datasets.Dataset.from_dict(columns).with_format("torch" if tensors else None)
    if kind == "map":
        return made
    stream = made.to_iterable_dataset(num_shards=2)
    return stream.shuffle(seed=seed, buffer_size=6) if kind == "shuffled" else stream


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x)
        return result


def job(kind: str, **data: Any) -> Job:
    return toy_job(
        model={"call": f"{HERE}:Classifier"},
        data={"train": {"call": f"{HERE}:rows", "kind": kind}, "target": "label", **data},
        train={"epochs": 2, "global_batch": BATCH, "seed": 3},
    )


def weights(rank: int, size: int, kind: str, folder: Path, stop_after: int | None) -> dict[str, torch.Tensor]:
    trained = session_of(train(job(kind), folder / str(rank) if size == 1 else folder, stop_after, rank, size))
    return {name: value.clone() for name, value in trained.state_dict().items()}


@pytest.mark.parametrize("kind", ["stream", pytest.param("shuffled", marks=pytest.mark.soak), "map"])
def test_two_ranks_that_are_stopped_and_resumed_train_as_one(two: RankPool, tmp_path: Path, kind: str) -> None:
    alone = weights(0, 1, kind, tmp_path / "alone", None)
    two.run(weights, kind, tmp_path / "run", 3)
    for trained in two.run(weights, kind, tmp_path / "run", None):
        assert all(torch.allclose(trained[name], alone[name], atol=1e-6) for name in alone)


def test_a_run_continues_a_stream_at_its_saved_state(tmp_path: Path) -> None:
    weights(0, 1, "stream", tmp_path, 3)
    resumed = train(job("stream"), tmp_path / "0", 4)
    assert resumed.session.steps == 4
    alone = train(job("stream"), tmp_path / "other", 4)
    for name, value in session_of(alone).state_dict().items():
        assert torch.equal(value, session_of(resumed).state_dict()[name])
    assert session_of(resumed).stream_state is not None


def test_a_job_on_a_stream_is_checked_with_its_first_samples() -> None:
    parts = JobParts(job("shuffled"))
    check_job(parts.job, mw.Plan(), cpu_cluster(1), parts)
    assert tuple(parts.sample["x"].shape) == (2, 20)


def test_the_example_of_the_documentation_gives_batches_of_tokens(tmp_path: Path) -> None:
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "few": 3, "words": 4}
    tokenizer = load("transformers:PreTrainedTokenizerFast")(
        tokenizer_object=load("tokenizers:Tokenizer")(load("tokenizers.models:WordLevel")(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        unk_token="[UNK]",
    )
    tokenizer.backend_tokenizer.pre_tokenizer = load("tokenizers.pre_tokenizers:Whitespace")()
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    (tmp_path / "texts.jsonl").write_text('{"text": "a few words"}\n{"text": "words"}\n')
    (example,) = code_blocks("docs/data.md", "python")
    module: dict[str, Any] = {}
    exec(example, module)
    rows = module["texts"](str(tmp_path / "texts.jsonl"), str(tmp_path / "tokenizer"), length=4)
    (batch,) = train_batches(
        rows, seed=0, global_batch=2, share=SampleShare(), loading=LoadingOptions(), epochs=1, drop_last=True
    )
    data = batch.microbatches[0].data
    assert sorted(data["input_ids"].tolist()) == [[2, 3, 4, 0], [4, 0, 0, 0]]
    assert data["attention_mask"].sum() == 4


# ---- loops


def session_on(size: int) -> Session:
    torch.manual_seed(0)
    model = Classifier()
    plan = {"axes": {"replicate": size}}
    return mw.parallelize(
        model, torch.optim.SGD(model.parameters(), 0.1), loss=F.cross_entropy, plan=plan, target="label"
    )


def looped(rank: int, size: int, kind: str) -> list[float]:
    session = session_on(size)
    loader = DataLoader(rows(kind), batch_size=BATCH)
    return [float(session.step(batch)) for batch in session.prepare(loader)]


@pytest.mark.parametrize("kind", ["map", "shuffled"])
def test_a_loader_is_divided_exactly(two: RankPool, kind: str) -> None:
    alone = looped(0, 1, kind)
    assert len(alone) == 5
    for losses in two.run(looped, kind):
        assert losses == pytest.approx(alone, abs=1e-6)


def differently_shuffled(rank: int, size: int, use: str) -> str:
    session, data = session_on(size), rows("shuffled", seed=rank)
    with pytest.raises(InputError) as caught:
        session.prepare(DataLoader(data, BATCH)) if use == "prepare" else session.batches(data, 1, BATCH)
    return str(caught.value)


@pytest.mark.parametrize("use", ["batches", "prepare"])
def test_a_stream_that_every_rank_shuffles_differently_is_refused(two: RankPool, use: str) -> None:
    for message in two.run(differently_shuffled, use):
        assert message.startswith(
            "the first samples of the stream IterableDataset are not the same on ranks 0 and 1: each rank builds the"
        )
