"""Tests how a training is made small: which blocks are kept, how the plan names them, and that nothing is changed."""

from copy import deepcopy

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.proof.before_training.reduction import (
    Reduction,
    reduced_plan,
    reduced_training,
    removable_blocks,
    shortened,
)
from meshwright.proof.before_training.vocabulary import large_vocabularies, narrow_tokens, narrow_vocabulary
from tests.proof.before_training.models import Blocks, training

PIPELINE = Plan.model_validate(
    {"axes": {"pipeline": 3}, "pipeline": {"cuts": ["blocks.1", "blocks.4.up"], "microbatches": 3}}
)


def test_the_blocks_that_a_plan_cuts_are_kept() -> None:
    model = Blocks(8)
    assert removable_blocks(model, PIPELINE) == tuple(f"blocks.{number}" for number in (2, 3, 5, 6))
    assert removable_blocks(model, Plan()) == tuple(f"blocks.{number}" for number in range(1, 7))
    assert removable_blocks(Blocks(4), Plan()) == ()


def test_the_plan_names_the_blocks_that_are_left() -> None:
    splits = {"blocks.4.up": {"kind": "column"}, "blocks.5.up": {"kind": "column"}, "blocks.*.down": {"kind": "row"}}
    plan = PIPELINE.model_copy(update={"modules": Plan.model_validate({"modules": {"splits": splits}}).modules})
    reduction = Reduction(removable_blocks(Blocks(8), plan))
    smaller = reduced_plan(plan, Blocks(8), reduction)
    assert smaller.pipeline.cuts == ("blocks.1", "blocks.2.up")
    assert list(smaller.modules.splits) == ["blocks.2.up", "blocks.*.down"]


def test_a_smaller_training_leaves_the_given_one_as_it_was() -> None:
    subject = training(Blocks(8))
    head = subject.model.get_parameter("head.weight")
    head.grad = torch.ones_like(head)
    before = deepcopy(subject.model.state_dict())
    small = reduced_training(subject, Reduction(removable_blocks(subject.model, PIPELINE)))
    assert [name for name, _ in small.model.named_children()] == ["blocks", "dropout", "head"]
    assert len(small.model.get_submodule("blocks")) == 4  # type: ignore[arg-type]
    assert torch.equal(
        small.model.get_parameter("blocks.2.up.weight"), subject.model.get_parameter("blocks.4.up.weight")
    )
    trained = [id(p) for group in small.optimizer.param_groups for p in group["params"]]
    assert trained == [id(p) for p in small.model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in subject.model.state_dict().items())
    assert head.grad is not None
    assert small.model.get_parameter("head.weight").grad is None


def test_batches_are_cut_in_all_dimensions_but_that_of_samples() -> None:
    batch = {"tokens": torch.zeros(128, 128), "images": torch.zeros(128, 3, 256, 256), "scale": torch.ones(256)}
    short = shortened(batch, {128: 64, 256: 32})
    assert {name: tuple(value.shape) for name, value in short.items()} == {
        "tokens": (128, 64),
        "images": (128, 3, 32, 32),
        "scale": (32,),
    }
    assert shortened(batch, {}) is batch


def test_models_of_other_containers_keep_their_blocks() -> None:
    assert removable_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Plan()) == ()


class Language(nn.Module):
    """An embedding and a head with the same weight, and a bias of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.vocabulary = 5000
        self.embedding, self.head = nn.Embedding(5000, 4), nn.Linear(4, 5000)
        self.head.weight = self.embedding.weight


def test_a_large_vocabulary_is_made_small_and_stays_tied() -> None:
    model = Language()
    sizes = large_vocabularies(model)
    assert sizes == {5000: 512}
    narrow_vocabulary(model, sizes)
    assert model.head.weight is model.embedding.weight
    assert (model.vocabulary, model.head.out_features, model.embedding.num_embeddings) == (512, 512, 512)
    assert model.head(model.embedding(torch.tensor([511]))).shape == (1, 512)
    tokens = narrow_tokens({"tokens": torch.tensor([4999, 3, -100]), "class": torch.tensor([7])}, sizes)
    assert tokens["tokens"].tolist() == [4999 % 512, 3, -100]
    assert tokens["class"].tolist() == [7]
    assert large_vocabularies(Blocks()) == {}
