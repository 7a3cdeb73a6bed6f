"""Grouped products run in the dtype of autocast, and are traced and looked up in the dtype in which they run."""

import gc

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshwright.calibrate.compute_bound_cases import compute_bound_cases
from meshwright.cluster.cluster import OperatorTime
from meshwright.parallel.precision import forward_precision
from meshwright.plan import Plan
from meshwright.profile.grouped_products import CASTS_OF_GROUPED_PRODUCTS
from meshwright.profile.tracing.trace import trace_profile
from meshwright.simulator.compute.lookup import classify_measurement, classify_operator
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import NextTokenLoss
from tests.train.one_process import world
from tests.zoo import LENGTH, mixture

BF16 = Plan.model_validate({"numerics": {"precision": "bf16"}})
ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


def operands() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 16, generator=draw).requires_grad_(), torch.randn(4, 16, 8, generator=draw).requires_grad_()


def test_autocast_casts_grouped_products_also_when_they_are_recomputed() -> None:
    rows, weights = operands()
    expected = F.grouped_mm(rows.bfloat16(), weights.bfloat16(), offs=ENDS)
    with CASTS_OF_GROUPED_PRODUCTS.made():  # until the backward pass, which recomputes
        with forward_precision(BF16, "cpu"):
            product = F.grouped_mm(rows, weights, offs=ENDS)
            again = checkpoint(lambda x: F.grouped_mm(x, weights, offs=ENDS), rows, use_reentrant=False)
        assert torch.equal(product, expected)
        product.float().square().sum().backward()
        first, rows.grad = rows.grad, None
        again.float().square().sum().backward()
    assert first is not None
    assert rows.grad is not None
    assert torch.equal(first, rows.grad)
    assert F.grouped_mm(rows, weights, offs=ENDS).dtype == torch.float32


def test_casts_are_registered_while_a_session_of_lower_precision_lives() -> None:
    def session(plan: Plan) -> Session:
        model = torch.nn.Linear(2, 1)
        return Session(model, lambda p: torch.optim.SGD(p.values(), lr=0.1), loss=F.mse_loss, plan=plan, world=world())

    def dtype_in_autocast() -> torch.dtype:
        rows, weights = operands()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.grouped_mm(rows, weights, offs=ENDS).dtype

    gc.collect()
    in_fp32 = session(Plan())
    assert not CASTS_OF_GROUPED_PRODUCTS.is_made
    first, second = session(BF16), session(BF16)
    assert dtype_in_autocast() == torch.bfloat16
    del first
    gc.collect()
    assert dtype_in_autocast() == torch.bfloat16
    del second
    gc.collect()
    assert not CASTS_OF_GROUPED_PRODUCTS.is_made
    assert dtype_in_autocast() == torch.float32
    del in_fp32


def test_products_are_traced_in_their_own_dtype_and_have_a_class_of_their_own() -> None:
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    profile = trace_profile(mixture(), (tokens, tokens), NextTokenLoss(), precision="fp32")
    grouped = [o for s in profile.segments for o in s.operators if "grouped" in o.name]
    assert grouped
    assert {operator.dtype for operator in grouped} == {"float32"}
    classes = [classify_operator(operator, 2, 1.0, operator.computes_gradient) for operator in grouped]
    assert {round(2 ** found.sizes[0], 6) for found in classes if found} == {4.0}
    assert {found.name for found in classes if found} == {"grouped_matmul"}


def test_a_calibration_times_grouped_products_with_their_gradients() -> None:
    cases = [case for case in compute_bound_cases(large=False) if case.operator == "grouped_matmul"]
    assert cases
    for case in cases:
        result = case.build(torch.float32, torch.device("cpu"))()
        groups, m, n, _ = case.shape
        assert result.shape == (m, n)
        assert result.requires_grad
        row = OperatorTime(
            operator="grouped_matmul",
            dtype="fp32",
            shape=case.shape,
            flops=case.flops,
            bytes=case.elements,
            seconds=1.0,
        )
        name, sizes = classify_measurement(row)
        assert (name, 2 ** sizes[0]) == ("grouped_matmul", groups)
