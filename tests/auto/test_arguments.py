"""Numbers that cannot be meant are refused by name and value, before anything is searched, predicted or trained."""

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import InputError

MODEL = torch.nn.Linear(2, 1)
BATCH = (torch.ones(4, 2), torch.ones(4, 1))
LOSS = torch.nn.functional.mse_loss


@pytest.mark.parametrize("value", [-5, 0, float("nan"), 2.5, "x", None, True])
def test_a_global_batch_that_is_no_number_of_samples_is_refused(value: Any) -> None:
    message = "^global_batch is .*: give a whole number of at least 1$"
    with pytest.raises(InputError, match=message):
        mw.best_plan(MODEL, BATCH, loss=LOSS, global_batch=value, cluster="2xcpu")
    with pytest.raises(InputError, match=message):
        mw.predict(MODEL, BATCH, loss=LOSS, global_batch=value, cluster="8xH100")
    session = mw.parallelize(torch.nn.Linear(2, 1), loss=LOSS, device="cpu")
    with pytest.raises(InputError, match=message):
        session.batches(torch.utils.data.TensorDataset(*BATCH), 1, global_batch=value)


@pytest.mark.parametrize("value", [-1, float("nan"), 1.5])
def test_a_negative_number_of_epochs_is_refused(value: Any) -> None:
    session = mw.parallelize(torch.nn.Linear(2, 1), loss=LOSS, device="cpu")
    with pytest.raises(InputError, match=r"^epochs is .*: give a whole number of at least 0$"):
        session.batches(torch.utils.data.TensorDataset(*BATCH), value, global_batch=2)


def test_a_model_that_is_none_is_refused() -> None:
    missing: Any = None
    with pytest.raises(InputError, match=r"model is a NoneType, not an nn\.Module"):
        mw.predict(missing, BATCH, loss=LOSS, global_batch=8, cluster="8xH100")
    with pytest.raises(InputError, match=r"model is a NoneType, not an nn\.Module"):
        mw.best_plan(missing, BATCH, loss=LOSS, global_batch=8, cluster="8xH100")


def test_a_cluster_that_is_no_name_is_refused() -> None:
    missing: Any = None
    with pytest.raises(InputError, match=r"^cluster is a NoneType: give a name"):
        mw.predict(MODEL, BATCH, loss=LOSS, global_batch=8, cluster=missing)
