"""Pipeline stages that are sharded with FSDP2 reduce their gradients once a step, in the last accumulation round."""

import pytest
import torch

from meshwright.parallel.apply import apply
from tests.parallel.pipeline.test_pipeline import microbatches_of, total
from tests.parallel.pipeline.test_tied_stages import bert
from tests.proof.matrix import plan_of
from tests.proof.traffic.counter import bytes_by_collective, count_traffic
from tests.ranks import RankPool


def reduced_bytes(rank: int, size: int, case: str, microbatches: int) -> int:
    model, batch = bert()
    parallel = apply(plan_of("bert", case), model, torch.device("cpu"), size, batch)
    examples = microbatches_of(batch, [4 // microbatches] * microbatches)
    with count_traffic(parallel.mesh) as counter:
        parallel.run_microbatches(examples, lambda output, *_: total(output), lambda _, loss: loss)
    return sum(
        count
        for (_, collective), count in bytes_by_collective(counter.collectives).items()
        if collective == "reduce_scatter"
    )


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble"])
def test_gradients_are_reduced_once_a_step(four: RankPool, schedule: str) -> None:
    once = four.run(reduced_bytes, f"S2P2 {schedule}", 2)
    assert all(once)
    assert four.run(reduced_bytes, f"S2P2 twice {schedule}", 4) == once
