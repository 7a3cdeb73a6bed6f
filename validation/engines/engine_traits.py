"""`EngineTraits`: the fields of engines.yaml, which say how a program of published measurements differs from eager
PyTorch."""

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.simulator.runtime import Orchestration, Runtime

HALF_PRECISIONS = ("bf16", "fp16", "fp8")


class EngineTraits(Runtime):
    """How a program differs from eager PyTorch. The operators that it executes (engine_profile.py):
    `half_weights`          weights and activations have the dtype of the products, beside fp32 copies for the optimizer
    `fused`                 dropout, residual sums and casts are part of other kernels
    `writes_scores`         attention writes the scores of all pairs of tokens to memory
    `drops_scores`          such attention applies dropout to the scores
    `masks_scores_in_place` such attention, where it is not fused, masks the scores in place, in a view
    `unfused_loss`          a cross entropy over a vocabulary is computed line by line in fp32
    `attention_slowdown`    how many times longer its attention takes than the reference GPU's share of the peak
    `recomputed_products`   the share of the products that selective recomputation computes again
    `recomputes_attention`  whether selective recomputation computes attention again
    `keeps_float8_weights`  under fp8, weights are kept in 8 bits, and other operands are cast once for both passes,
                            with their scale and their transpose, by one kernel (Transformer Engine)
    `expert_parts`          the tensor ranks that divide the rows of experts
    `vocabulary_multiple`   the multiple that a rank's part of the vocabulary is padded to

    The memory that it needs beside tensors: `exchange_buffer_bytes`, where anything is sharded.

    What it communicates:
    `sends_tokens_once`     a token is sent once to a rank that has several of its experts (DeepEP, HybridEP)
    `weight_share`, `gradient_share`  bytes sent for each byte of an fp32 parameter
    `scatters_at_cuts`      each tensor rank sends its part over a pipeline cut, and the next stage all-gathers it
    `all_reduces_shards`    gradients of sharded parameters are all-reduced instead of reduce-scattered
    `sums_tied_whole`       gradients of weights that stages share are summed before they are sharded

    Its host needs `launch_factor` times the reference host's time for an operator. With `blocks_on_launch` it waits for
    each operator before it starts the next one (CUDA_LAUNCH_BLOCKING)."""

    name: str
    orchestration: Orchestration = Orchestration()
    tf32_convolutions: bool = True  # PyTorch's default
    half_weights: bool = False
    fused: bool = False
    writes_scores: bool = False
    drops_scores: bool = True
    masks_scores_in_place: bool = False
    unfused_loss: bool = False
    attention_slowdown: PositiveFloat = 1.0
    recomputed_products: NonNegativeFloat = 0.0
    recomputes_attention: bool = False
    keeps_float8_weights: bool = False
    expert_parts: PositiveInt = 1
    vocabulary_multiple: PositiveInt = 1
    exchange_buffer_bytes: NonNegativeFloat = 0.0
    sends_tokens_once: bool = False
    weight_share: PositiveFloat = 1.0
    gradient_share: PositiveFloat = 1.0
    scatters_at_cuts: bool = False
    all_reduces_shards: bool = False
    sums_tied_whole: bool = False
    launch_factor: NonNegativeFloat = 1.0
    blocks_on_launch: bool = False

    def keeps_half_weights(self, precision: str) -> bool:
        """Whether weights and activations are kept in half precision under a plan of this precision."""
        return self.half_weights and precision in HALF_PRECISIONS
