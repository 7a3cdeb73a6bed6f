"""How a proof is printed and saved."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from meshwright.errors import InputError, StorageError
from meshwright.plan import Plan
from meshwright.proof.compare.errors import Comparison
from meshwright.proof.proof import Proof, save_proof
from meshwright.proof.show import show

RIGHT = Proof(
    plan=Plan.model_validate({"axes": {"replicate": 2}}),
    ranks=2,
    device="cpu",
    steps=3,
    dtype="fp64",
    comparison=Comparison().with_tolerance(1e-11).with_error(1, "loss", None, 1e-14),
    tolerance_is="2 × 4 layers × 10",
    notes=("dropout is off",),
)
WRONG = replace(RIGHT, comparison=RIGHT.comparison.with_error(2, "gradient", "layers[bold].0", 0.25), shrunk="a to b")


def printed(proof: Proof) -> str:
    console = Console(file=StringIO(), width=160)
    show(proof, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_right_plan_is_shown_with_its_error_and_tolerance() -> None:
    text = printed(RIGHT)
    assert "Equal: replicate 2 · fp32 on 2 CPU ranks trains as one device does, 3 steps compared in fp64" in text
    assert "1.00e-14" in text
    assert "1.00e-11 = 2 × 4 layers × 10" in text
    assert "dropout is off" in text


def test_a_wrong_plan_is_shown_with_where_it_first_differs() -> None:
    text = printed(WRONG)
    assert "Not equal" in text
    assert "the gradient of layers[bold].0 in step 2 is 2.50e-01 off" in text
    assert "a to b" in text


@pytest.mark.parametrize(
    ("step", "what", "words"),
    [
        (0, "initial weight", "the initial weight of a before the first step is"),
        (2, "weight", "the weight of a after step 2 is"),
        (2, "buffer", "the buffer of a after step 2 is"),
    ],
)
def test_the_headline_says_when_it_differs(step: int, what: str, words: str) -> None:
    assert words in printed(replace(RIGHT, comparison=Comparison().with_error(step, what, "a", 1.0)))  # type: ignore[arg-type]


def test_each_proof_has_a_file_of_its_own(tmp_path: Path) -> None:
    paths = [save_proof(proof, tmp_path / "runs", "mnist") for proof in (RIGHT, WRONG)]
    assert [path.name for path in paths] == ["mnist-proof-0001.json", "mnist-proof-0002.json"]
    assert json.loads(paths[1].read_text()) == WRONG.details()


def test_a_folder_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(InputError, match="cannot write in"):
        save_proof(RIGHT, tmp_path / "runs", "mnist")


def test_json_has_no_infinity() -> None:
    infinite = replace(RIGHT, comparison=RIGHT.comparison.with_error(1, "weight", "a", math.inf))
    assert json.loads(json.dumps(infinite.to_dict(), allow_nan=False))["first_difference"]["error"] is None


@pytest.mark.usefixtures("used_up_quota")
def test_a_proof_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="the quota of user"):
        save_proof(RIGHT, tmp_path, "mnist")
    assert list(tmp_path.iterdir()) == []
