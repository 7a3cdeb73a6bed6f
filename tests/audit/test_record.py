"""`mw.record` and `mw.compare`: a training in a `with` block is recorded, changed in nothing, and compared."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils import clip_grad_norm_

import meshwright as mw
from meshwright.audit.audit import AuditRequest, record
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.settings import Settings
from meshwright.errors import InputError
from tests.cli.commands import run_in_process
from tests.ranks import run_ranks

Step = Callable[[nn.Module, Tensor, Tensor], None]
ROWS = 8


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


def _whole(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    cross_entropy(model(inputs), targets).backward()


def _in_two(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    for rows, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (cross_entropy(model(rows), wanted) / 2).backward()


def _one_row_off(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    _in_two(model, inputs, targets)
    gradient = model[0].weight.grad  # type: ignore[index]
    gradient[3] *= 1.01


def _train(folder: Path, step: Step = _whole, steps: int = 4, model: nn.Module | None = None, **options: Any) -> Tensor:
    """Returns the weights after the last step, which is one more than is recorded."""
    model = _model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with mw.record(folder, model, optimizer, **options):
        _loop(model, optimizer, step, steps)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs, targets = torch.randn(ROWS, 16, generator=draw), torch.randint(4, (ROWS,), generator=draw)
        optimizer.zero_grad()
        step(model, inputs, targets)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def test_right_trainings_are_equal_with_and_without_a_noise_run(tmp_path: Path) -> None:
    _train(tmp_path / "a")
    _train(tmp_path / "b", _in_two)
    _train(tmp_path / "noise", reference=tmp_path / "a", rounding=True)
    for noise in (None, tmp_path / "noise"):
        result = mw.compare(tmp_path / "a", tmp_path / "b", noise=noise)
        assert result.equal, result.to_dict()
        assert (result.steps, result.checked["gradients"], result.checked["norms"]) == (3, 18, 3)
        assert "Equal" in str(result)


@pytest.mark.parametrize("with_noise", [False, True])
def test_a_row_that_is_a_hundredth_off_is_found_with_and_without_a_noise_run(tmp_path: Path, with_noise: bool) -> None:
    _train(tmp_path / "a")
    _train(tmp_path / "b", _one_row_off)
    noise = tmp_path / "noise" if with_noise else None
    if noise:
        _train(noise, reference=tmp_path / "a", rounding=True)
    result = mw.compare(tmp_path / "a", tmp_path / "b", noise=noise)
    first = result.first_difference
    assert first is not None
    assert (first.step, first.what, first.name, first.rows) == (1, "gradient", "0.weight", (3,))
    assert not result.equal
    assert "0.weight on row 3 in step 1" in str(result)


def test_the_block_computes_the_same_bits_and_leaves_nothing(tmp_path: Path) -> None:
    names = sys.modules[__name__]
    before = [nn.Module.__call__, torch.autograd.backward, torch.nn.functional.dropout, torch.nn.utils.clip_grad_norm_]
    model = _model()
    recorded = _train(tmp_path / "a", model=model, dropout=True)
    alone = _model()
    _loop(alone, torch.optim.AdamW(alone.parameters(), lr=1e-3), _whole, 4)
    assert torch.equal(recorded, nn.utils.parameters_to_vector(alone.parameters()))
    after = [nn.Module.__call__, torch.autograd.backward, torch.nn.functional.dropout, torch.nn.utils.clip_grad_norm_]
    assert all(left is right for left, right in zip(before, after, strict=True))
    assert names.clip_grad_norm_ is clip_grad_norm_ is torch.nn.utils.clip_grad_norm_
    assert not model._forward_pre_hooks


def test_dropout_is_off_unless_it_is_asked_for(tmp_path: Path) -> None:
    ones = torch.ones(1000)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters())
    for number, (keeps, expected) in enumerate(((False, 1000), (True, 0))):
        with mw.record(tmp_path / str(number), layer, optimizer, dropout=keeps):
            assert int((dropout(ones, 0.5) == 1).sum()) == int((nn.Dropout()(ones) == 1).sum()) == expected
    assert int((dropout(ones, 0.5) == 1).sum()) == 0


def test_a_block_that_raises_is_recorded_up_to_there(tmp_path: Path) -> None:
    model = _model()

    def fails(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        _whole(model, inputs, targets)
        if len(list((tmp_path / "a").rglob("0002-gradient-*"))):
            raise ZeroDivisionError("no luck")

    with pytest.raises(ZeroDivisionError):
        _train(tmp_path / "a", fails, model=model)
    _train(tmp_path / "b")
    run = RecordedRun(tmp_path / "a")
    assert run.steps == 2
    assert run.whole(2, "weight", "0.weight") is not None
    result = mw.compare(tmp_path / "b", tmp_path / "a")
    assert result.equal
    assert result.steps == 2
    assert any("failed on rank 0 after step 2: ZeroDivisionError: no luck" in note for note in result.notes)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(("step", "code"), [(_in_two, 0), (_one_row_off, 3)])
def test_the_command_line_compares_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: Step, code: int
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    _train(folders[0])
    _train(folders[1], step)
    command = ("--against", *map(str, folders), "--json", "--output", str(tmp_path / "saved.json"))
    result = run_in_process(monkeypatch, capsys, ("prove", *command))
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["equal"] == (code == 0)
    assert json.loads((tmp_path / "saved.json").read_text())["kind"] == "audit"
    with_job = run_in_process(monkeypatch, capsys, ("prove", "job.yaml", *command))
    assert with_job.exit_code == 2
    assert "are of no job" in with_job.stderr


class _Sgd:
    """An optimizer that is none of torch."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": 0.1}]

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def test_loops_that_call_no_module_and_optimizers_of_ones_own_are_recorded(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 1.01)):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = _Sgd(model)
        with mw.record(tmp_path / name, model, optimizer):
            for _ in range(5):
                (torch.ones(3, 4) @ model.weight.T + model.bias).square().mean().mul(factor).backward()
                optimizer.step()
        assert "step" not in vars(optimizer)
    assert RecordedRun(tmp_path / "a").steps == 3
    assert mw.compare(tmp_path / "a", tmp_path / "b").equal
    assert not mw.compare(tmp_path / "a", tmp_path / "c").equal


def test_names_with_a_prefix_have_counterparts(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _model()

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.net(inputs)
            return out

    _train(tmp_path / "a")
    _train(tmp_path / "b", model=Outer())
    assert mw.compare(tmp_path / "a", tmp_path / "b").equal


def test_the_start_of_another_record_is_loaded(tmp_path: Path) -> None:
    _train(tmp_path / "a")
    other = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    _train(tmp_path / "b", model=other, reference=tmp_path / "a")
    assert mw.compare(tmp_path / "a", tmp_path / "b").equal


def _on_a_rank(rank: int, world: int, folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(_model())

    def step(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        share = ROWS // world
        _whole(model, inputs[rank * share :][:share], targets[rank * share :][:share])

    _train(folder, step, model=model)
    with pytest.raises(InputError, match="is not empty"):
        _train(folder, step, model=model)


def test_ranks_are_recorded_together(tmp_path: Path) -> None:
    _train(tmp_path / "a")
    run_ranks(_on_a_rank, 2, tmp_path / "b")
    result = mw.compare(tmp_path / "a", tmp_path / "b")
    assert result.equal, result.to_dict()
    assert result.ranks == (1, 2)


def test_within_an_audit_nothing_is_recorded_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, meshwright as mw\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"with mw.record({str(tmp_path / 'own')!r}, model, optimizer):\n"
        "    for _ in range(5):\n"
        "        optimizer.zero_grad()\n"
        "        model(torch.ones(3, 4)).mean().backward()\n"
        "        optimizer.step()\n"
    )
    request = AuditRequest("", "", timeout_s=120)
    run = record("the reference", f"{sys.executable} {script}", request, tmp_path / "record", Settings())
    assert run.steps == 3
    assert len(run.events("step")) == 3
    assert not (tmp_path / "own").exists()


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "model": (lambda folder: mw.record(folder / "r", [], None), "the model is a list"),
    "optimizer": (lambda folder: mw.record(folder / "r", nn.Linear(1, 1), 3), "int has no param_groups"),
    "other parameters": (
        lambda folder: mw.record(folder / "r", nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters())),
        "none of the 2 parameters of SGD is one of the model's",
    ),
    "folder": (lambda folder: _record(folder.parent), "is not empty"),
    "file": (lambda folder: _record(Path(__file__)), "is not empty"),
    "reference": (lambda folder: _record(folder / "r", reference=folder / "none"), "there is no record"),
    "rounding": (lambda folder: _record(folder / "r", rounding=True), "name it by reference="),
    "steps": (lambda folder: _record(folder / "r", steps=0), "steps=0: take at least one"),
}


def _record(folder: Path, **options: Any) -> Any:
    layer = nn.Linear(1, 1)
    return mw.record(folder, layer, torch.optim.SGD(layer.parameters()), **options)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    make, words = BAD[name]
    with pytest.raises(InputError, match=words) as refusal, make(tmp_path / "inside"):
        pass
    assert "\n" not in str(refusal.value)


def test_a_record_within_a_record_is_refused(tmp_path: Path) -> None:
    with (
        _record(tmp_path / "a"),
        pytest.raises(InputError, match="another record is being made"),
        _record(tmp_path / "b"),
    ):
        pass


def test_folders_without_a_comparable_record_are_refused(tmp_path: Path) -> None:
    _train(tmp_path / "a")
    with _record(tmp_path / "b"):
        pass
    with pytest.raises(InputError, match="there is no record in this folder"):
        mw.compare(tmp_path / "a", tmp_path)
    with pytest.raises(InputError, match="no step of an optimizer was recorded"):
        mw.compare(tmp_path / "a", tmp_path / "b")
