"""Runs `Trainer` and `MeshwrightTrainer` on tiny models, in this process or on one rank of a pool."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from meshwright.processes.environment import environment_variables
from meshwright.user.torchvision_import import mend_torchvision

mend_torchvision()

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from tests.zoo_models.adapters import with_lora  # noqa: E402

VOCABULARY, CLASSES = 99, 3
_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}


def make_model(name: str) -> Any:
    """Returns a model with seeded weights."""
    set_seed(1)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(num_key_value_heads=4, **_SIZES))
    if name == "llama of means":  # returns the mean over the tokens of its batch, as some models for images and text do
        model = make_model("llama")
        model.accepts_loss_kwargs = False
        return model
    if name == "gpt2":  # has dropout, and its output layer has the weights of its embedding
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=VOCABULARY))
    if name == "adapters":
        return with_lora(make_model("llama"))
    assert name == "classifier"
    no_dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    labels: dict[str, Any] = {"num_labels": CLASSES}
    return BertForSequenceClassification(BertConfig(**labels, **no_dropout, **_SIZES))


class Texts(Dataset[dict[str, Any]]):
    """Sequences of unequal lengths. About a third of their tokens have no label, and some samples have hardly any."""

    def __init__(self, count: int, classes: bool = False, seed: int = 0) -> None:
        draws = np.random.default_rng(seed)
        self.samples: list[dict[str, Any]] = []
        for _ in range(count):
            tokens = draws.integers(3, VOCABULARY, draws.integers(4, 15))
            labels = np.where(draws.random(len(tokens)) < draws.random() * 0.7, -100, tokens)
            label = int(tokens.sum() % CLASSES) if classes else labels.tolist()
            self.samples.append({"input_ids": tokens.tolist(), "labels": label})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Pads the samples to the longest one."""
    length = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor([sample[name] + [value] * (length - len(sample[name])) for sample in samples])

    mask = [[1] * len(s["input_ids"]) + [0] * (length - len(s["input_ids"])) for s in samples]
    batch = {"input_ids": padded("input_ids", 0), "attention_mask": torch.tensor(mask)}
    if isinstance(samples[0]["labels"], list):
        return {**batch, "labels": padded("labels", -100)}
    return {**batch, "labels": torch.tensor([sample["labels"] for sample in samples])}


def compute_metrics(prediction: Any) -> dict[str, float]:
    """How many labels there were, and how many of them the model predicts."""
    labels, logits = prediction.label_ids, prediction.predictions
    if labels.ndim == 2:
        labels, logits = labels[:, 1:], logits[:, :-1]
    valid = labels != -100
    right = (logits.argmax(-1) == labels) & valid
    return {"samples": len(labels), "count": int(valid.sum()), "right": int(right.sum())}


def loss_of_folder(folder: Path) -> float:
    """The loss of the first evaluated batch, of a language model that plain transformers loads."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    evaluated = Texts(11, seed=7)
    with torch.no_grad():
        return float(model.eval()(**collate([evaluated[index] for index in range(4)])).loss)


class StopAfter(TrainerCallback):
    """Ends the training after some steps, as a killed process does, with all that was saved so far."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self.steps
        return control


@contextmanager
def launched(rank: int, size: int) -> Iterator[None]:
    """The environment variables of a launcher, for the ranks of a pool, which have made their process group already."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with environment_variables({name: str(value) for name, value in variables.items()} | address if size > 1 else {}):
        try:
            yield
        finally:  # accelerate keeps them for the life of a process
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            PartialState._reset_state()


class Stream(IterableDataset[dict[str, Any]]):
    """The texts as a stream."""

    def __init__(self, count: int) -> None:
        self.texts = Texts(count)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.texts.samples)


def make_trainer(model: Any, plan: Any, folder: str | Path, data: Any, evaluation: Any = None, **options: Any) -> Any:
    """Returns a trainer. `plan` is `trainer` for transformers' own. `options` are for `TrainingArguments`, except for
    `callbacks`, `metrics` and `trainer`, which are those of the trainer itself."""
    from meshwright.compat.transformers import MeshwrightTrainer

    class OwnLoss(Trainer):
        """A user's trainer with a loss of its own, a mean over samples."""

        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *_: Any, **__: Any) -> Any:
            output = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = (output.logits - inputs["labels"][:, None]).square().mean()
            return (loss, {"logits": output.logits}) if return_outputs else loss

    class OurOwnLoss(MeshwrightTrainer, OwnLoss):
        pass

    own = {name: options.pop(name) for name in ("callbacks", "optimizers") if name in options}
    kind: Any
    if options.pop("own_loss", False):
        kind = OwnLoss if plan == "trainer" else OurOwnLoss
    else:
        kind = Trainer if plan == "trainer" else MeshwrightTrainer
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 8,
        "learning_rate": 3e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
    }
    return kind(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **{**defaults, **options}),
        train_dataset=data,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=compute_metrics if evaluation is not None else None,
        **({} if plan == "trainer" else {"plan": plan}),
        **own,
    )


def train(
    rank: int,
    size: int,
    name: str,
    plan: Any,
    folder: str,
    samples: int = 22,
    resume: Any = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a model. Returns the logged losses, norms and learning rates, and the metrics of an evaluation of 11
    samples. The global batch is 4. The options are those of `make_trainer`, and `stop` and `is_stream`."""
    torch.set_num_threads(1)
    options = dict(options or {})
    stop, is_stream, batch = options.pop("stop", None), options.pop("is_stream", False), 4 // size
    with launched(rank, size):
        trainer = make_trainer(
            make_model(name),
            plan,
            folder,
            Stream(samples) if is_stream else Texts(samples, name == "classifier"),
            Texts(11, name == "classifier", seed=7),
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            callbacks=[StopAfter(stop)] if stop else [],
            **options,
        )
        trainer.train(resume_from_checkpoint=resume)
        metrics = trainer.evaluate()
        trainer.save_model(os.path.join(folder, "final"))
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "losses": [entry["loss"] for entry in logs],
            "norms": [float(entry["grad_norm"]) for entry in logs],
            "rates": [entry["learning_rate"] for entry in logs],
            "metrics": {k: v for k, v in metrics.items() if not k.endswith(("runtime", "second", "time"))},
        }
