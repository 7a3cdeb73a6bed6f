"""transformers' Trainer with a small Llama, its own AdamW, and labels that are ignored in unequal numbers."""

import argparse
import tempfile

import torch
from tiny_gpt import LENGTH, ROWS, VOCABULARY, text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

FAULTS = ("none", "mean_over_ranks", "accumulation", "weight_decay", "clipping", "adam_betas", "seed")


class Rows(Dataset):
    def __init__(self, steps: int) -> None:
        self.inputs, self.labels = text(steps, masked=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.inputs[row], "labels": self.labels[row]}


class PrintNorm(TrainerCallback):
    def on_log(self, args: TrainingArguments, state: object, control: object, **values: object) -> None:
        logs = values.get("logs")
        if isinstance(logs, dict) and "grad_norm" in logs and args.process_index == 0:
            print(f"step {state.global_step - 1} loss {logs['loss']} norm {logs['grad_norm']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            bf16=args.bf16,
            seed=1 if args.fault == "seed" else 0,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=args.accumulate,
            average_tokens_across_devices=args.fault != "mean_over_ranks",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0 if args.fault == "weight_decay" else 0.1,
            adam_beta2=0.95 if args.fault == "adam_betas" else 0.999,
            max_grad_norm=1.0 if args.fault == "clipping" else 0.5,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        arguments.per_device_train_batch_size = ROWS // args.accumulate // arguments.world_size
        trainer = Trainer(model, arguments, train_dataset=Rows(args.steps), callbacks=[PrintNorm()])
        if args.fault == "accumulation":
            trainer.model_accepts_loss_kwargs = False  # each microbatch's own mean, as before transformers 4.46
        trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
