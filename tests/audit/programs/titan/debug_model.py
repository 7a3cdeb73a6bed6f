"""torchtitan's Trainer with its debug model of Llama 3, unedited, on rows of text that are drawn here."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from cpu_stand_ins import install, reduce_by_sums, replace_flex_attention
from torch import Tensor

install()
reduce_by_sums()
replace_flex_attention()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

ROWS, LENGTH, VOCABULARY = 8, 32, 2048  # rows of a global batch


class Rows(BaseDataLoader):
    """Each rank of data parallelism has its share of each global batch; a tenth of the labels is ignored."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.world, self.rank, self.size = dp_world_size, dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(1234)
        places = torch.arange(LENGTH, dtype=torch.int32).expand(self.size, -1)
        while True:
            tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            ignored = torch.rand(ROWS, LENGTH, generator=generator) < torch.rand(ROWS, 1, generator=generator)
            labels = tokens[:, 1:].masked_fill(ignored, -100)
            share = ROWS // self.world
            for first in range(self.rank * share, (self.rank + 1) * share, self.size):
                rows = slice(first, first + self.size)
                yield {"input": tokens[rows, :-1], "positions": places}, labels[rows]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--backend", default="partial_dtensor")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    init_logger()
    config = llama3_debugmodel()
    config.dataloader, config.tokenizer = Rows.Config(), NoTokenizer.Config()
    config.training.seq_len, config.training.steps = LENGTH, args.steps
    config.training.global_batch_size = ROWS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "bfloat16" if args.bf16 else "float32"
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.validator.enable = config.checkpoint.enable = False
    config.parallelism.data_parallel_replicate_degree = args.replicate
    config.parallelism.tensor_parallel_degree = args.tensor
    config.parallelism.spmd_backend = args.backend
    ranks = int(os.environ["WORLD_SIZE"]) // args.tensor
    config.training.local_batch_size = ROWS // ranks // args.accumulate
    with tempfile.TemporaryDirectory() as folder:
        config.dump_folder = folder
        trainer = config.build()
        trainer.train()
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
