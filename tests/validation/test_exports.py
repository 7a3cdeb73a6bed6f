"""Exported plans are trained by the programs that they were exported for: the same layout and the same losses."""

from pathlib import Path

import pytest

from validation.bench.peers.catalog import DEFAULT_PYTHON
from validation.exports.compare import CASES, Case, run_case

PYTHON = Path(__file__).parents[2] / DEFAULT_PYTHON


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PYTHON.exists(), reason="needs DeepSpeed and Accelerate: make peers")
@pytest.mark.parametrize("case", CASES, ids=[f"{case.program}-{case.name}" for case in CASES])
def test_a_program_trains_by_an_exported_plan(case: Case, tmp_path: Path) -> None:
    result = run_case(case, PYTHON, 6, tmp_path, predicts=False)
    assert result["equal"], result
