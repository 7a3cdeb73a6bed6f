"""trl's SFTTrainer on top of `MeshwrightTrainer`, with and without adapters of peft."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")
pytest.importorskip("trl", reason="SFTTrainer needs the package trl: pip install trl==1.16.0")

from tests.compat.transformers.test_trainer import CLOSE, SHARD
from tests.compat.transformers.trainers import VOCABULARY, Texts, launched, make_model
from tests.ranks import RankPool


def fine_tune(rank: int, size: int, plan: Any, folder: str, with_adapters: bool) -> dict[str, Any]:
    """Trains on prompts and completions. `plan` is `trl` for SFTTrainer itself. Returns losses and metrics."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from meshwright.compat.transformers import MeshwrightTrainer

    class OurSFTTrainer(MeshwrightTrainer, SFTTrainer):
        pass

    words = {f"w{number}": number for number in range(VOCABULARY - 3)}
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    numbers = words | {word: len(words) + number for number, word in enumerate(special.values())}
    tokens = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()

    def text(numbers: list[int]) -> str:
        return "".join(f" w{number % len(words)}" for number in numbers)

    samples = [{"prompt": text(s["input_ids"][:3]), "completion": text(s["input_ids"][3:])} for s in Texts(19).samples]
    data = Dataset.from_list(samples)
    with launched(rank, size):
        batch = {"per_device_train_batch_size": 4 // size, "per_device_eval_batch_size": 4 // size}
        quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False}
        arguments: Any = SFTConfig(
            output_dir=folder,
            max_steps=6,
            learning_rate=1e-2,
            logging_steps=1,
            gradient_checkpointing=False,
            max_length=16,
            **batch,
            **quiet,
        )
        kind: Any = SFTTrainer if plan == "trl" else OurSFTTrainer
        trainer = kind(
            model=make_model("llama"),
            args=arguments,
            train_dataset=data,
            eval_dataset=data.select(range(11)),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, **special),
            peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM") if with_adapters else None,
            **({} if plan == "trl" else {"plan": plan}),
        )
        trainer.train()
        metrics = trainer.evaluate()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {
            "losses": [entry["loss"] for entry in logs],
            "accuracies": [entry["mean_token_accuracy"] for entry in logs],
            "eval": [metrics[f"eval_{name}"] for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens")],
        }


@pytest.mark.parametrize("with_adapters", [False, True], ids=["whole", "adapters"])
def test_sft_gives_the_losses_of_trl(with_adapters: bool, two: RankPool, tmp_path: Path) -> None:
    expected = fine_tune(0, 1, "trl", str(tmp_path), with_adapters)
    assert fine_tune(0, 1, None, str(tmp_path), with_adapters) == expected
    for plan in (None, SHARD):
        result = two.run(fine_tune, plan, str(tmp_path), with_adapters)[0]
        for name, values in expected.items():
            assert result[name] == pytest.approx(values, **CLOSE), name
