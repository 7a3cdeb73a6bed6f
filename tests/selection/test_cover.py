"""The tables of what was run count tests by folder and by the axes, models and precisions of their cases."""

from typing import Any, Literal

import pytest

from tests.selection.cover import MODELS, axes_of, cover_table
from tests.zoo import ZOO


def test_the_tables_count_and_give_reasons() -> None:
    def report(nodeid: str, outcome: Literal["passed", "skipped", "failed"], reason: Any = None) -> pytest.TestReport:
        return pytest.TestReport(nodeid, ("", 0, ""), {}, outcome, reason, "call")

    reports = [
        report("tests/blocks/test_a.py::test_b", "passed"),
        report("tests/test_c.py::test_d[x/y]", "passed"),
        report("tests/proof/test_matrix.py::test_g[gpt-S2P2 twice]", "passed"),
        report("tests/train/test_h.py::test_i[llama-shard-bf16]", "passed"),
        report("tests/proof/test_matrix.py::test_g[gpt-T2]", "failed"),
        report("tests/planner/test_j.py::test_k[2xT4]", "passed"),
        report("tests/compat/ray/test_e.py::test_f", "skipped", ("file", 1, "Skipped: Ray is not installed")),
    ]
    assert list(cover_table(reports)) == [
        "blocks            1 passed",
        "compat/ray        0 passed, 1 skipped",
        "its own files     1 passed",
        "planner           1 passed",
        "proof             1 passed",
        "train             1 passed",
        "shard     with gpt 1 · llama 1 · fp32, fp64 1 · bf16 1",
        "pipeline  with gpt 1 · fp32, fp64 1",
        "skipped 1: Ray is not installed",
    ]


def test_axes_are_read_from_words_and_sizes() -> None:
    assert axes_of("mixture-R2S2E2 twice") == ["replicate", "shard", "expert"]
    assert axes_of("llama: context") == ["context"]
    assert axes_of("{'axes': {'tensor': 2}}") == ["tensor"]
    assert axes_of("GPT2-sharded") == []


def test_the_models_of_the_matrix_have_columns() -> None:
    assert set(ZOO) <= set(MODELS)
