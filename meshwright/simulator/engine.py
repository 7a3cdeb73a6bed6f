"""What the program that runs a plan adds to what the hardware takes: a named calibration. Ours adds nothing; those of
published measurements (engines.yaml) say how they differ from eager PyTorch, and their `launch` is fitted on other rows
than they are judged by."""

from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from meshwright.errors import InputError, did_you_mean
from meshwright.yaml_file import read_mapping, validated

FILE = Path(__file__).with_name("engines.yaml")


class Arranging(BaseModel):
    """What a core spends in every microbatch beside computing, in operators that it could start meanwhile: for a unit
    of sharded weights, for an exchange of a split layer, for a stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    unit: NonNegativeFloat = 0.0
    exchange: NonNegativeFloat = 0.0
    stage: NonNegativeFloat = 0.0


class Engine(BaseModel):
    """What runs (engine_profile.py, engine_memory.py):
    `half_weights` weights and activations lie in the type of the products, beside fp32 copies for the optimizer;
    `fused`        dropout, residual sums and casts are part of other kernels;
    `scores`       attention writes out the scores of all pairs of tokens, and drops some (`drops_scores`);
    `masks_views`  where that is not fused, what lies ahead is filled in, in place, in a view of the scores;
    `plain_loss`   a cross entropy over words is computed line by line in fp32, each a pass over all scores;
    `attention`    how many times longer its attention takes than the reference GPU's share of the peak;
    `again`        under selective recomputation, the share of the products that are computed again;
    `again_scores` under selective recomputation, attention is computed again;
    `tf32_images`  its convolutions of fp32 take tf32, as PyTorch lets them unless told otherwise;
    `pads`         a divided vocabulary is filled up to a multiple of so many words a rank;
    `sums`         bytes a weight that adding up the gradients of one more microbatch moves: it reads both and writes
                   one; 12 in fp32.

    What it keeps beside: `buffers_bytes` for exchange where anything is sharded.

    What is sent: bytes of `weight` and `gradient` for each of a parameter (fp32); `scatters`: of what crosses a
    pipeline's cut each tensor rank sends its part, and the next stage gathers it; `whole_cuts`: each sends all of it,
    also of what is divided along the sequence; `sends_wait`: a stage goes on when what it sent has arrived;
    `whole_sums`: where anything is sharded, gradients are all-reduced, not scattered; `shared_first`: those of weights
    that stages share are summed before, as whole ones; `combines`: gradients of CPU
    ranks by the plan's algorithm, else by the backend's own.

    Parts of a pass behind which exchange can hide: `overlaps` gradients, `gathers` weights, `tensor_overlaps` of the
    tensor exchange itself.

    Factors on seconds: of `communication`, of the host's `launch`; `waits`: for each operator before it starts the next
    one (CUDA_LAUNCH_BLOCKING); `step_s` is spent once a step;
    `arranging` is what a core does for a plan beside computing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    half_weights: bool = False
    fused: bool = False
    scores: bool = False
    drops_scores: bool = True
    masks_views: bool = False
    plain_loss: bool = False
    attention: PositiveFloat = 1.0
    again: NonNegativeFloat = 0.0
    again_scores: bool = False
    tf32_images: bool = True
    pads: PositiveInt = 1
    accumulate_bytes_per_weight: NonNegativeFloat = 12.0
    buffers_bytes: NonNegativeFloat = 0.0
    weight: PositiveFloat = 1.0
    gradient: PositiveFloat = 1.0
    scatters: bool = False
    sends_wait: bool = False
    whole_cuts: bool = False
    whole_sums: bool = False
    shared_first: bool = False
    combines: bool = False
    overlaps: NonNegativeFloat = 1.0
    gathers: NonNegativeFloat = 1.0
    tensor_overlaps: NonNegativeFloat = 0.0
    communication: PositiveFloat = 1.0
    launch: NonNegativeFloat = 1.0
    waits: bool = False
    step_s: NonNegativeFloat = 0.0
    arranging: Arranging = Arranging()


@lru_cache(maxsize=1)
def engines() -> dict[str, Engine]:
    raw = read_mapping(FILE, "engines")
    named = {name: values for name, values in raw.items() if not name.startswith("_")}
    return {
        name: validated(Engine, {"name": name, **values}, f"engines.yaml: {name}") for name, values in named.items()
    }


def find_engine(name: str) -> Engine:
    if name not in engines():
        raise InputError(f"there is no engine '{name}'{did_you_mean(name, engines())}")
    return engines()[name]
