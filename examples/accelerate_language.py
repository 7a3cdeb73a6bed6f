"""A small language model of transformers in a loop of Hugging Face's Accelerate, with accumulation, clipping, trackers
and perplexity. Only the import of `Accelerator` is Meshwright's.

    accelerate launch examples/accelerate_language.py --output_dir run
"""

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from meshwright.compat.accelerate import Accelerator

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40


def sequences(length):
    """The text as sequences of bytes."""
    codes = torch.tensor(list(TEXT.encode()))
    return [{"input_ids": part, "labels": part} for part in codes.split(length) if len(part) == length]


def main(arguments):
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        mixed_precision=arguments.mixed_precision,
        log_with="tensorboard" if arguments.with_tracking else None,
        project_dir=arguments.output_dir,
        **plan_options(arguments),
    )
    set_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    data = sequences(32)
    train_loader = DataLoader(data[:64], batch_size=4, shuffle=True)
    eval_loader = DataLoader(data[64:], batch_size=4)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, 4, arguments.epochs * len(train_loader))
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    if arguments.with_tracking:
        accelerator.init_trackers("language", {"epochs": arguments.epochs, "seed": arguments.seed})

    for epoch in range(arguments.epochs):
        model.train()
        total = 0.0
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        for batch in eval_loader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        perplexity = math.exp(torch.cat(losses).mean().item())
        loss = accelerator.reduce(total / len(train_loader), reduction="mean").item()
        accelerator.print(f"epoch {epoch}: loss {loss:.6f}, perplexity {perplexity:.4f}")
        if arguments.with_tracking:
            accelerator.log({"loss": loss, "perplexity": perplexity}, step=epoch)

    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        Path(arguments.output_dir) / "model",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    accelerator.end_training()


def plan_options(arguments):
    return {"plan": json.loads(arguments.plan)} if arguments.plan else {}


def read_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--plan", help="the groups of a plan as JSON")
    parser.add_argument("--with_tracking", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main(read_arguments())
