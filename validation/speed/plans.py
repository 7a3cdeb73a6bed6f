"""The plans of the steps that are recorded in h200.json, by variant."""

from typing import Any

from meshwright.plan import Plan

PLANS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"cuda_graphs": True},
    "compiled": {"compile": "model"},
    "compiled with graphs": {"compile": "model", "cuda_graphs": True},
    "compiled blocks": {"compile": "blocks"},
    "compiled blocks with graphs": {"compile": "blocks", "cuda_graphs": True},
}


def plan_of(case: dict[str, Any], variant: str) -> Plan:
    """The plan of a variant for a case of validation/steps/cases.yaml: bf16, with a fused optimizer, and images in
    channels_last."""
    compute = {"fused_optimizer": True, **PLANS[variant]}
    if "tokens" not in case["input"]:
        compute["layout"] = "channels_last"
    return Plan.model_validate({"numerics": {"precision": "bf16"}, "compute": compute})
