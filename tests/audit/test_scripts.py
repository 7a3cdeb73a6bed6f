"""Scripts as users write them, also broken and unusual ones, are recorded, or said in one line why they are not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.audit.audit import AuditFailed, AuditRequest, record
from meshwright.audit.from_python.compare_folders import compare
from meshwright.audit.recorded_run import RecordedRun
from meshwright.audit.recorder.settings import Settings
from meshwright.errors import InputError

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
draw = torch.Generator().manual_seed(1)
def loss():
    inputs, targets = torch.randn(6, 4, generator=draw), torch.randint(2, (6,), generator=draw)
    return nn.functional.cross_entropy(model(inputs), targets)
"""
STEPS = """
for _ in range(5):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
"""
RUN = {
    "plain": HEAD + STEPS,
    "two optimizers": HEAD
    + "other = nn.Linear(2, 1)\n"
    + "second = torch.optim.Adam(other.parameters())\n"
    + STEPS.replace(
        "optimizer.step()", "optimizer.step(); second.zero_grad(); other(torch.ones(3, 2)).sum().backward()"
    )
    + "    second.step()\n",
    "closure": HEAD
    + "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)\n"
    + "def closure():\n    optimizer.zero_grad()\n    value = loss()\n    value.backward()\n    return value\n"
    + "for _ in range(5): optimizer.step(closure)\n",
    "foreach and gradients of None": HEAD
    + "unused = nn.Parameter(torch.zeros(3))\n"
    + "optimizer = torch.optim.AdamW([*model.parameters(), unused], foreach=True)\n"
    + STEPS.replace("zero_grad()", "zero_grad(set_to_none=True)"),
    "accumulation": HEAD + STEPS.replace("loss().backward()", "(loss() / 2).backward(); (loss() / 2).backward()"),
    "fused": HEAD + "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n" + STEPS,
    "two norms": HEAD
    + STEPS.replace(
        "optimizer.step()", "[nn.utils.clip_grad_norm_(part.parameters(), 0.1) for part in model]; optimizer.step()"
    ),
    "evaluation between steps": HEAD
    + STEPS
    + "    model.eval()\n    with torch.no_grad(): model(torch.ones(2, 4))\n    model.train()\n",
}
IN_CLOSURE = STEPS.replace("optimizer.zero_grad()", "def closure():\n        optimizer.zero_grad()").replace(
    "    loss().backward()\n    optimizer.step()",
    "        loss().backward()\n        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n    optimizer.step(closure)",
)
SAME = {
    "a compiled model": HEAD.replace("draw =", "model = torch.compile(model, backend='aot_eager')\ndraw =") + STEPS,
    "a compiled step": HEAD + "optimizer.step = torch.compile(optimizer.step, backend='aot_eager')\n" + STEPS,
    "a scaler": HEAD
    + "scaler = torch.amp.GradScaler('cpu')\n"
    + STEPS.replace("loss().backward()", "scaler.scale(loss()).backward()").replace(
        "optimizer.step()", "scaler.step(optimizer); scaler.update()"
    ),
}
FAIL = {
    "no training": ("import torch\nprint(torch.ones(2))", "called no model in training mode"),
    "no step": (HEAD + "loss().backward()", "took no optimizer step"),
    "a crash": (
        HEAD + STEPS + "    if _ == 1: raise RuntimeError('out of luck')",
        "failed with exit code 1: RuntimeError: out",
    ),
    "no torch": ("print(1)", "called no model in training mode"),
    "killed": (
        HEAD + STEPS + "    if _ == 1:\n        import os\n        os.abort()",
        "recorded 2 of 3 steps, and failed with exit code -6",
    ),
    "too short": (
        HEAD + STEPS.replace("range(5)", "range(2)") + "raise SystemExit(4)",
        "recorded 2 of 3 steps, and failed",
    ),
}


def _recorded(folder: Path, script: str, **settings: object) -> RecordedRun:
    folder.mkdir(exist_ok=True)
    file = folder / "script.py"
    file.write_text(script)
    request = AuditRequest("", "", timeout_s=120)
    return record("the reference", f"{sys.executable} {file}", request, folder / "record", Settings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RUN)
def test_three_steps_are_recorded_and_the_script_is_ended(tmp_path: Path, name: str) -> None:
    run = _recorded(tmp_path, RUN[name])
    assert run.steps == 3
    assert [event["reason"] for event in run.events("end")] == ["steps"]
    assert all(run.whole(step, "weight", next(iter(run.parameters))) is not None for step in (1, 2, 3))


@pytest.mark.parametrize("name", FAIL)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, name: str) -> None:
    script, words = FAIL[name]
    with pytest.raises(AuditFailed, match=words) as refusal:
        _recorded(tmp_path, script)
    assert "\n" not in str(refusal.value)


def test_a_process_that_is_killed_after_its_last_step_was_recorded(tmp_path: Path) -> None:
    run = _recorded(tmp_path, HEAD + STEPS.replace("range(5)", "range(3)") + "import os\nos.abort()")
    assert run.steps == 3
    assert run.notes() == ["rank 0 was killed after step 3"]


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    request = AuditRequest("", "")
    with pytest.raises(InputError, match=r"no-such-program train\.py: cannot be started"):
        record("the reference", "no-such-program train.py", request, tmp_path / "record", Settings())


def test_the_script_computes_the_same_bits_as_without_us(tmp_path: Path) -> None:
    """With its own start and with dropout."""
    printed = HEAD + STEPS.replace("range(5)", "range(2)")
    printed += "print([value.tolist() for value in model.state_dict().values()])"
    run = _recorded(tmp_path, printed, start="own", keep_dropout=True, steps=2)
    recorded = (run.folder / "output.txt").read_text()
    alone = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert json.loads(recorded) == json.loads(alone.stdout)
    assert run.steps == 2


def test_a_script_may_have_a_sitecustomize_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _recorded(tmp_path, "theirs\n" + RUN["plain"]).steps == 3


def test_gradients_that_a_closure_computes_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Also in the first step, in whose closure the model is called for the first time."""
    plain = STEPS.replace("optimizer.step()", "nn.utils.clip_grad_norm_(model.parameters(), 0.1); optimizer.step()")
    runs = [_recorded(tmp_path / name, HEAD + steps) for name, steps in (("plain", plain), ("closure", IN_CLOSURE))]
    for step in (1, 2, 3):
        for kind in ("unclipped", "gradient", "weight"):
            for name in runs[0].parameters:
                expected, value = (run.whole(step, kind, name) for run in runs)
                assert expected is not None
                assert value is not None
                assert torch.equal(value, expected), (step, kind, name)
        assert len(runs[1].events("inputs", step)) == len(runs[1].events("norm", step)) == 1


def test_only_the_first_gradients_of_several_in_one_step_are_compared(tmp_path: Path) -> None:
    run = _recorded(tmp_path, RUN["closure"])
    assert [len(run.events(kind, 1)) for kind in ("inputs", "loss", "step")] == [1, 1, 1]
    start, after = (run.whole(step, kind, "0.weight") for step, kind in ((0, "start"), (1, "weight")))
    assert start is not None
    assert after is not None
    assert not torch.equal(start, after)


def test_gradients_that_a_step_reduces_before_it_calls_its_base_class_are_written_after_it(tmp_path: Path) -> None:
    kind = """
class Reducing(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)
        return super().step(closure)
"""
    run = _recorded(tmp_path, HEAD + kind + "optimizer = Reducing(model.parameters(), lr=0.5)\n" + STEPS)
    start, gradient, after = (run.whole(*of, "0.weight") for of in ((0, "start"), (1, "gradient"), (1, "weight")))
    assert start is not None
    assert gradient is not None
    assert after is not None
    assert torch.allclose(start - 0.5 * gradient, after, atol=1e-6)


def test_launchers_say_the_rank_in_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    run = _recorded(tmp_path, HEAD + STEPS.replace("range(5)", "range(2)"))
    assert [(rank.rank, rank.header["world_size"]) for rank in run.ranks] == [(1, 2)]


@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_samplers_that_shuffle_are_recorded(tmp_path: Path, shuffle: bool) -> None:
    rows = f"rows = torch.utils.data.DataLoader(torch.randn(30, 4), batch_size=6, shuffle={shuffle})\n"
    steps = "for row in rows:\n    optimizer.zero_grad()\n    model(row).sum().backward()\n    optimizer.step()\n"
    run = _recorded(tmp_path, HEAD + rows + steps)
    assert run.ranks[0].header["samplers"] == ([["RandomSampler", ""]] if shuffle else [])


@pytest.mark.soak
@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_is_equal_to_the_plain_script(tmp_path: Path, name: str) -> None:
    for folder, script in (("plain", RUN["plain"]), ("other", SAME[name])):
        (tmp_path / folder).mkdir()
        _recorded(tmp_path / folder, script)
    result = compare(tmp_path / "plain" / "record", tmp_path / "other" / "record")
    assert (result.equal, result.steps) == (True, 3), result.to_dict()


def test_a_parameter_without_a_counterpart_is_listed(tmp_path: Path) -> None:
    extra = "nn.Linear(8, 2))\nmodel.register_parameter('extra', nn.Parameter(torch.ones(2)))"
    for folder, script in (("plain", RUN["plain"]), ("other", RUN["plain"].replace("nn.Linear(8, 2))", extra))):
        (tmp_path / folder).mkdir()
        _recorded(tmp_path / folder, script)
    folders = [tmp_path / "plain" / "record", tmp_path / "other" / "record"]
    assert compare(*folders).only_candidate == ("extra",)
    missing = compare(*reversed(folders))
    assert missing.only_reference == ("extra",)
    assert not missing.equal


@pytest.mark.soak
def test_ranks_that_step_unequally_are_one_line(tmp_path: Path) -> None:
    script = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
    script += RUN["plain"].replace("range(5)", "range(5 - 3 * dist.get_rank())")
    file = tmp_path / "script.py"
    file.write_text(script)
    command = f"torchrun --standalone --nproc-per-node 2 {file}"
    run = record("the candidate", command, AuditRequest("", "", timeout_s=120), tmp_path / "record", Settings())
    assert run.steps == 2
    assert "rank 1 took 2 optimizer steps and others 3: the first 2 are compared" in run.notes()
