"""`EarlyStopping`: after how many evaluations it ends a run, also one that was resumed."""

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.train.callbacks import EarlyStopping
from meshwright.train.output.folder import read_result
from tests.train.one_process import EVALUATED, toy_job, train
from tests.train.test_trainer import PRESET_VALUES

NAN = float("nan")


def stopping_job(values: list[float], **options: Any) -> Job:
    """A job that evaluates after every step, with these values of its metric `preset`."""
    PRESET_VALUES[:] = values
    return toy_job(
        data=EVALUATED["data"],
        metrics={"preset": {"call": "tests.train.test_trainer:PresetMetric"}},
        log={"eval_every_steps": 1},
        train={"epochs": None, "steps": len(values)},
        callbacks=[{"call": "meshwright.train.callbacks:EarlyStopping", "metric": "preset", **options}],
    )


@pytest.mark.parametrize(
    ("values", "options", "steps", "reason"),
    [
        ([1, 3, 2, 2, 9], {"patience": 2}, 4, "preset was best at step 2 (3), 2 evaluations ago"),
        ([3, 1, 2, 2, 0], {"patience": 2, "better": "lower"}, 4, "preset was best at step 2 (1), 2 evaluations ago"),
        ([1, 1, 1, 1, 1], {}, 4, "preset was best at step 1 (1), 3 evaluations ago"),
        ([NAN, NAN, 5, 5, 5], {"patience": 2}, 2, "preset was never a finite number, 2 evaluations ago"),
        ([1, 2, 1, 3, 2], {"patience": 2}, 5, None),
    ],
)
def test_a_run_ends_when_the_metric_was_not_better_for_so_many_evaluations(
    tmp_path: Path, values: list[float], options: dict[str, Any], steps: int, reason: str | None
) -> None:
    trainer = train(stopping_job(values, **options), tmp_path)
    result = read_result(trainer.folder)
    assert result is not None
    assert (result["steps"], result.get("stopped")) == (steps, reason)


def test_a_resumed_run_counts_the_evaluations_before(tmp_path: Path) -> None:
    values: list[float] = [3, 2, 2, 2, 2, 2]
    train(stopping_job(values, patience=3), tmp_path, stop_after=3)
    trainer = train(stopping_job(values[3:], patience=3).model_copy(update={"train": _steps(6)}), tmp_path)
    assert trainer.session.steps == 4


def _steps(steps: int) -> Any:
    return toy_job(train={"epochs": None, "steps": steps}).train


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="patience is 0: write a number of evaluations, at least 1"):
        EarlyStopping(patience=0)
    with pytest.raises(InputError, match="better is 'more': write lower or higher"):
        EarlyStopping(better="more")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"metric is 'prest', but metrics has no metric .* did you mean 'preset'"):
        train(stopping_job([1.0], metric="prest"), tmp_path / "a")
    callbacks = [{"call": "meshwright.train.callbacks:EarlyStopping"}]
    with pytest.raises(InputError, match=r"EarlyStopping: data\.eval is missing"):
        train(toy_job(callbacks=callbacks), tmp_path / "b")
