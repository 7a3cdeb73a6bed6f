"""A GPT of megatron-core with tensor parallelism: `torchrun --nproc-per-node 2 megatron_gpt.py --tensor 2 --mla`."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import cpu_stand_ins
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

VOCABULARY, LENGTH, ROWS, MICROBATCHES = 64, 16, 8, 2
FAULTS = (
    *("none", "tensor_size", "data_size", "microbatches", "query_norm_not_summed", "norm_of_one_part"),
    *("mean_of_own_tokens", "weight_decay", "row"),
)


class LatentCoreAttention(DotProductAttention):
    """Multi-latent attention passes sizes that only Transformer Engine's attention takes."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)


def build(args: argparse.Namespace) -> GPTModel:
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 64,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": args.tensor,
        "pipeline_model_parallel_size": args.pipeline,
        "pipeline_dtype": torch.bfloat16 if args.bf16 else torch.float32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "qk_layernorm": True,
        "add_bias_linear": not (args.swiglu or args.experts),
        "normalization": "RMSNorm" if args.swiglu else "LayerNorm",
        "init_method_std": 0.2,
        "bf16": args.bf16,
        "params_dtype": torch.bfloat16 if args.bf16 else torch.float32,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "finalize_model_grads_func": None if args.fault == "query_norm_not_summed" else finalize_model_grads,
    }
    if args.swiglu:
        values |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    if args.mla:
        values |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8}
        values |= {"rope_type": "rope", "apply_rope_fusion": False}
    if args.sinks:
        values["softmax_type"] = "learnable"
    if args.experts:
        values |= {"num_moe_experts": 4, "expert_model_parallel_size": args.experts, "moe_router_topk": 2}
        values |= {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none"}
    config = MLATransformerConfig(**values) if args.mla else TransformerConfig(**values)
    spec = get_gpt_layer_local_spec(
        num_experts=values.get("num_moe_experts"),
        qk_layernorm=True,
        multi_latent_attention=args.mla,
        normalization=values["normalization"],
    )
    if args.mla:
        spec.submodules.self_attention.submodules.core_attention = LatentCoreAttention
    return GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=args.tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def sum_over_tensor_ranks(gradient: Tensor) -> Tensor:
    gradient = gradient.contiguous()
    dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient


def sum_gradients_of_rope(model: GPTModel) -> None:
    """A repair of megatron-core 0.16.1: the position part of the keys is used by every rank's heads."""
    sizes = [model.config.kv_lora_rank, model.config.qk_pos_emb_head_dim]

    def gather(module: torch.nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Any]:
        whole = tensor_parallel.gather_from_tensor_model_parallel_region(output[0])
        compressed, position = torch.split(whole, sizes, dim=-1)
        position.register_hook(sum_over_tensor_ranks)
        return torch.cat([compressed, position], dim=-1), output[1]

    for layer in model.decoder.layers:
        layer.self_attention.linear_kv_down_proj.register_forward_hook(gather)


def divide_gradients_of_query_norms(model: GPTModel, tensor: int) -> None:
    """A repair of megatron-core 0.16.1: every rank has the whole gradient, and the ranks' gradients are summed."""
    for layer in model.decoder.layers:
        layer.self_attention.q_layernorm.weight.main_grad /= tensor


def count_all_sinks(model: GPTModel) -> None:
    """A repair of megatron-core 0.16.1 (Megatron-LM#7452): attention sinks are divided over the tensor ranks."""
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.softmax_offset.tensor_model_parallel = True


def microbatches(step: int, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1234 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    ends = torch.randint(LENGTH - 2, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH) >= ends).float()
    own = torch.arange(ROWS).chunk(world)[rank]
    for rows in own.chunk(MICROBATCHES):
        yield tokens[rows, :-1], tokens[rows, 1:], mask[rows]


def loss_function(mask: Tensor, tokens: Tensor, factor: float, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses.float() * mask).sum() / tokens * factor
    return loss, {"loss": loss.detach()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="the number of ranks that experts are divided over")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--sinks", action="store_true", help="a learned logit of each head beside those of the keys")
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--mla", action="store_true", help="multi-latent attention")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--repair", nargs="*", default=[], choices=["rope", "query_norm", "sinks"])
    parser.add_argument("--fault", default="none", choices=FAULTS)
    args = parser.parse_args()

    cpu_stand_ins.install()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tensor, args.pipeline, expert_model_parallel_size=args.experts or 1)
    torch.manual_seed(0)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    gpt = build(args)
    if "rope" in args.repair:
        sum_gradients_of_rope(gpt)
    if "sinks" in args.repair:
        count_all_sinks(gpt)
    if args.fault == "norm_of_one_part":
        # A weight that was exchanged without its attributes counts as whole on the first rank.
        for layer in gpt.decoder.layers:
            layer.mlp.linear_fc1.weight.tensor_model_parallel = False
    divides = args.distributed_optimizer
    model = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(use_distributed_optimizer=divides), gpt)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            weight_decay=0.0 if args.fault == "weight_decay" else 0.1,
            clip_grad=0.5,
            bf16=args.bf16,
            use_distributed_optimizer=divides,
            params_dtype=gpt.config.params_dtype,
        ),
        [model],
    )

    rank, world = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    factors = {"tensor_size": args.tensor, "data_size": world, "microbatches": MICROBATCHES}
    factor = factors.get(args.fault, 1)
    for step in range(args.steps):
        data = list(microbatches(step, rank, world))
        tokens = torch.stack([mask.sum() for *_, mask in data]).sum() / MICROBATCHES
        if args.fault != "mean_of_own_tokens":
            dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
            tokens /= world

        def forward_step(batches: Iterator, model: torch.nn.Module, tokens: Tensor = tokens) -> tuple[Tensor, Any]:
            inputs, targets, mask = next(batches)
            positions = torch.arange(LENGTH).expand_as(inputs)
            count = mask.sum() if args.fault == "mean_of_own_tokens" else tokens
            return model(inputs, positions, None, labels=targets), partial(loss_function, mask, count, factor)

        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=[model],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=ROWS // world // MICROBATCHES,
            forward_only=False,
        )
        if "query_norm" in args.repair:
            divide_gradients_of_query_norms(gpt, args.tensor)
        if args.fault == "row" and dist.get_rank() == 0:
            gpt.decoder.layers[0].mlp.linear_fc1.weight.main_grad[3] *= 1.1 if args.bf16 else 1.01
        _, norm, _ = optimizer.step()
        if not parallel_state.is_pipeline_last_stage():
            continue
        loss = torch.stack([report["loss"] for report in reports]).mean()
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        if dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step} loss {loss.item() / world:.6f} norm {float(norm):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
