"""The CPU memory that the ranks of a machine with GPUs need, against what the machine has."""

from meshwright.numbers.units import bytes_text
from meshwright.plan import Plan
from meshwright.planner.inputs import PlanningInputs
from meshwright.simulator.predict import Prediction


def host_memory(plan: Plan, prediction: Prediction, inputs: PlanningInputs) -> list[str]:
    """Says so if the ranks of a machine with GPUs need more CPU memory than it has, for what the plan keeps there and
    for the copies of checkpoints. Empty if it is enough or not known."""
    memory = prediction.memory
    for node in inputs.cluster.nodes:
        needed_bytes = memory.host_bytes * min(node.count, plan.world_size)
        if node.host_memory_bytes and needed_bytes > node.host_memory_bytes:
            change = "set memory.offload to none" if plan.memory.offload != "none" else ""
            if memory.copy_bytes:
                change = "set checkpoint.asynchronous to false, which needs no copies of checkpoints"
            return [
                f"The ranks of a machine need {bytes_text(needed_bytes)} of CPU memory, of which"
                f" {bytes_text(memory.copy_bytes * min(node.count, plan.world_size))} are copies of checkpoints,"
                " but it has"
                f" {bytes_text(node.host_memory_bytes)}: {change}."
            ]
    return []
