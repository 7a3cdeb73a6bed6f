"""The groups of a plan's fields. Each field is marked with its effect on the numerical result."""

from math import gcd
from typing import Any, Literal

from pydantic import model_validator

from meshwright.numbers.limits import (
    Count,
    CountOrZero,
    Devices,
    LossChunks,
    MessageBytes,
    Microbatches,
    ProcessesOrZero,
    RankNumber,
    Samples,
    Steps,
    StepsOrZero,
    Threads,
)
from meshwright.plan_fields.effects import PlanGroup, choice

Algorithm = Literal["auto", "native", "ring", "tree", "halving_doubling", "two_level", "shared_memory"]
MIB = 2**20
BUCKET_BYTES = 25 * MIB  # the default of torch, too
# The last axis varies fastest over the ranks: tensor ranks, which exchange the most bytes, are neighbours. `expert` is
# no axis of the mesh: it divides the ranks of `replicate` and `shard` into groups.
MESH_ORDER = ("pipeline", "replicate", "shard", "context", "tensor")
STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "zbv": 2}  # the other schedules accept any number


class Axes(PlanGroup):
    """The sizes of the device mesh's axes. Their product, without `expert`, is the number of training ranks.

    `replicate`: ranks that hold a full copy of the model and train on different samples. `shard`: ranks that train on
    different samples and divide weights, gradients and optimizer state among them. `context`: ranks that train on
    different tokens of the same samples, and exchange the keys and values of attention. `tensor`: ranks that train on
    the same samples and divide the layers among them. `pipeline`: ranks that hold consecutive stages of the model.
    `expert`: how many of the ranks of `replicate` × `shard`, which it has to divide, share the experts of a mixture.
    Each holds a part of the experts and computes it for the tokens of all of them.
    """

    replicate: Devices = choice(1, "same")
    shard: Devices = choice(1, "same")
    context: Devices = choice(1, "same")
    tensor: Devices = choice(1, "same")
    pipeline: Devices = choice(1, "same")
    expert: Devices = choice(1, "same")

    @property
    def factors(self) -> dict[str, int]:
        """The sizes above 1 of the axes whose product is the number of training ranks."""
        return {name: size for name, size in self.model_dump(exclude={"expert"}).items() if size > 1}


class Split(PlanGroup):
    """How one layer's weight is divided among ranks, and along which axis of the mesh.

    `kind`: `column` divides the output features, `row` the input features, `vocabulary` the tokens of an embedding or
    of an output layer; `none` leaves the layer undivided. With `axis: replicate` the batch is all-gathered before the
    layer and scattered again after it. A few huge layers can thus be divided while the rest of the model is replicated.
    """

    kind: Literal["column", "row", "vocabulary", "none"]
    axis: Literal["tensor", "replicate"] = "tensor"


class Modules(PlanGroup):
    """How the layers are divided over the tensor axis.

    `splits` maps module names to splits; in a name, `*` stands for one component between dots. Layers that are not
    named are split along the tensor axis as the model's structure suggests. `sequence`: activations between split
    layers are divided along the sequence dimension. `loss`: logits stay divided by vocabulary up to and including the
    loss. `branches` maps the module names of towers or heads to the tensor-axis rank that computes them; the other
    ranks receive the output. `attention_exchange`: how ranks of the context axis get each other's keys and values:
    `all_gather` gathers all of them before the rank's queries attend to them; `ring` passes them on from rank to rank
    while queries attend to those that have arrived.
    """

    splits: dict[str, Split] = choice({}, "same")
    sequence: bool = choice(False, "same")
    loss: bool = choice(False, "same")
    branches: dict[str, RankNumber] = choice({}, "same")
    attention_exchange: Literal["all_gather", "ring"] = choice("all_gather", "same")

    def split_of(self, module: str) -> Split | None:
        """The split that `splits` gives the module, by the first pattern that matches; None when no pattern does."""
        components = module.split(".")
        for pattern, split in self.splits.items():
            patterns = pattern.split(".")
            if len(patterns) == len(components) and all(
                wanted in ("*", actual) for wanted, actual in zip(patterns, components, strict=True)
            ):
                return split
        return None


class Pipeline(PlanGroup):
    """How the stages of the pipeline axis are cut and scheduled.

    `microbatches`: number of microbatches into which a rank's share of a step is cut for the pipeline. `cuts`: the
    modules after which a new stage begins, so the number of cuts is ranks × stages per rank - 1. With `gpipe` and
    `1f1b` every rank has one stage; with the other schedules it may have several.
    """

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"] = choice("1f1b", "same")
    microbatches: Microbatches = choice(1, "same")
    cuts: tuple[str, ...] = choice((), "same")


class Memory(PlanGroup):
    """How the plan saves memory at the cost of communication or compute.

    `sharding`: what the shard axis divides: with `optimizer` the optimizer state, with `gradients` also the gradients,
    with `parameters` also the parameters. `recompute`: which activations of a block are computed again in the backward
    pass: `none`; `selective`, all but those of matrix products and attention; `full`, all of them. `accumulation`:
    number of microbatches that a rank computes one after another before gradients are combined. `offload`: what GPU
    ranks keep in CPU memory: with `optimizer` the optimizer state, whose step runs there; with `parameters` all shards.
    """

    sharding: Literal["optimizer", "gradients", "parameters"] = choice("parameters", "same")
    recompute: Literal["none", "selective", "full"] = choice("none", "same")
    accumulation: Microbatches = choice(1, "same")
    offload: Literal["none", "optimizer", "parameters"] = choice("none", "rounding")


class NumericsGroup(PlanGroup):
    """In which precision the model computes.

    `precision`: `fp32` keeps the dtypes that the model was built with. `tf32` does too, but multiplies matrices with
    10-bit mantissas. `bf16` and `fp16` run the forward pass under autocast, `fp16` with a scaled loss. `fp8` is `bf16`
    with the matrix products of linear layers in 8 bits. `auto` is replaced before the run by the precision that is
    measured to be the fastest.
    `cast`: what is rounded to `bf16` or `fp16`: the inputs of `operators` (autocast), or the `weights` before the
    shard axis gathers them, while their fp32 originals stay sharded.
    `batch_norm`: whether BatchNorm's statistics are taken over a rank's own microbatch (`local`) or over the
    microbatches of all data-parallel ranks (`synchronized`).
    """

    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp8", "auto"] = choice("fp32", "changes")
    cast: Literal["operators", "weights"] = choice("operators", "changes")
    batch_norm: Literal["local", "synchronized"] = choice("local", "changes")


class Gradients(PlanGroup):
    """How the ranks of the replicate axis combine their gradients.

    `algorithm`: the all-reduce algorithm; `auto` uses shared memory between CPU ranks of one machine, and the backend's
    own all-reduce elsewhere. `bucket_bytes`: size of the buckets in which gradients are sent. `precision`: the dtype in
    which they are sent; `fp32` means the parameters' own dtype. `powersgd_rank`: when above 0, PowerSGD compresses each
    gradient to two factors of this rank. `local_steps`: number of steps that each rank takes alone before weights are
    averaged (local SGD); in the first `local_after` steps, gradients are still averaged in every step.
    `servers`: number of additional ranks that hold the parameters and the optimizer (parameter servers); 0 means none.
    `updates`: the servers wait for the gradients of all workers (`synchronous`), of none (`asynchronous`), or let no
    worker run ahead of the slowest one by more than `staleness` steps (`bounded`).
    """

    algorithm: Algorithm = choice("auto", "same")
    bucket_bytes: MessageBytes = choice(BUCKET_BYTES, "same")
    precision: Literal["fp32", "bf16", "fp16"] = choice("fp32", "changes")
    powersgd_rank: CountOrZero = choice(0, "changes")
    local_steps: Steps = choice(1, "changes")
    local_after: StepsOrZero = choice(0, "changes")
    servers: ProcessesOrZero = choice(0, "same")
    updates: Literal["synchronous", "asynchronous", "bounded"] = choice("synchronous", "changes")
    staleness: StepsOrZero = choice(2, "changes")


class Compute(PlanGroup):
    """How each rank runs its operators.

    `layout`: memory format of image tensors. `convolutions`: which kernels compute the convolutions of CPU ranks:
    torch's `default`, or `nnpack`, those of NNPACK with gradients as convolutions and matrix products. `compile`: what
    `torch.compile` compiles: `none`, each of the model's `blocks` by itself, or the whole `model`. `compile_mode`: with
    `max-autotune`, the compiler measures several kernels for each product. `cuda_graphs`: kernel launches are captured
    once as a CUDA graph and replayed. `fused_optimizer`: one kernel updates many weights. `loss_chunks`: when above 1,
    the head (the linear layer that computes the scores) is joined with the cross entropy, and the tokens of a
    microbatch go through both in this many chunks, so that only the scores of one chunk are in memory. `threads`: CPU
    threads per rank; null divides the machine's cores among its ranks.
    """

    layout: Literal["contiguous", "channels_last"] = choice("contiguous", "rounding")
    convolutions: Literal["default", "nnpack"] = choice("default", "rounding")
    compile: Literal["none", "blocks", "model"] = choice("none", "rounding")
    compile_mode: Literal["default", "max-autotune"] = choice("default", "rounding")
    cuda_graphs: bool = choice(False, "rounding")
    fused_optimizer: bool = choice(False, "rounding")
    loss_chunks: LossChunks = choice(1, "rounding")
    threads: Threads | None = choice(None, "rounding")

    @property
    def image_kernels(self) -> Literal["contiguous", "channels_last", "nnpack"]:
        """What decides the speed of operators on images: their memory format, or the kernels of their convolutions."""
        return self.layout if self.convolutions == "default" else "nnpack"


class Shares(PlanGroup):
    """How samples and weights are divided among ranks that are not alike: samples of a global batch by the speed of
    data ranks, weights by the memory of shard ranks.

    `samples`: how many samples of a global batch each data rank gets. The number of a data rank is its coordinate on
    the replicate axis × the size of the shard axis + its coordinate on the shard axis. A global batch of another size
    than their sum, such as a short last batch, is divided in the same proportions, into whole samples. Without
    `samples`, shares are even. `adaptive`: shares follow the speeds of the ranks while the run goes on; `samples` are
    those of the first steps. `shards`: the proportions in which the ranks of the shard axis, by their coordinate on it,
    divide the rows of weights, gradients and optimizer state, such as `[2, 1]` for a device with twice as much memory
    as the other; without them, evenly. Short forms of the group: `shares: [86, 42]` and `shares: adaptive`.
    """

    samples: tuple[Samples, ...] = choice((), "same")
    adaptive: bool = choice(False, "same")
    shards: tuple[Count, ...] = choice((), "same")

    @property
    def uneven_shards(self) -> tuple[int, ...]:
        """`shards` without a common factor; empty if all ranks hold equally many rows."""
        factor = gcd(*self.shards)
        return tuple(part // factor for part in self.shards) if len(set(self.shards)) > 1 else ()

    @model_validator(mode="before")
    @classmethod
    def _read_short_forms(cls, values: Any) -> Any:
        if values == "adaptive":
            return {"adaptive": True}
        if isinstance(values, list | tuple):
            return {"samples": values}
        if not isinstance(values, dict | cls):
            raise ValueError(f"{values!r} is no division of a batch: write adaptive, or samples by data rank: [86, 42]")
        return values


GROUPS: dict[str, type[PlanGroup]] = {
    "axes": Axes,
    "modules": Modules,
    "pipeline": Pipeline,
    "memory": Memory,
    "numerics": NumericsGroup,
    "gradients": Gradients,
    "compute": Compute,
    "shares": Shares,
}
