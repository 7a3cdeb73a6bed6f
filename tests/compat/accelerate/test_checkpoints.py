"""`save_state` and `load_state`: a resumed loop continues as if it had not been interrupted, under any plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate.utils import ProjectConfiguration  # noqa: E402

from meshwright.compat.accelerate import Accelerator  # noqa: E402
from meshwright.errors import InputError, MeshwrightError  # noqa: E402
from tests.compat.accelerate.loops import accelerate_process, network, samples  # noqa: E402

SHARDED: dict[str, Any] = {"axes": {"shard": 2}}


class Counter:
    """An object of a script that is registered for checkpoints."""

    def __init__(self) -> None:
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def normalized_network(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(network(), nn.Dropout(dropout), nn.BatchNorm1d(1).double())


def epochs(
    accelerator: Any, first: int, last: int, skip: int, load: Path | None = None, save: Path | None = None
) -> list[float]:
    """Trains from epoch `first` on, to the end of the epoch before `last`. If there is something to load, it leaves out
    the first `skip` batches of the first epoch. If there is something to save, it saves and ends after `skip` batches
    of the last epoch, or where this is 0 after all of them. Returns the losses, the last learning rate and the number
    of batches."""
    torch.manual_seed(11 + accelerator.process_index)
    # The order in which a loader and a model draw random numbers is that of an uninterrupted loop between epochs only.
    model, counter = normalized_network(0.0 if skip else 0.1), Counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    loader: Any = DataLoader(samples(48), batch_size=4, shuffle=not skip)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.register_for_checkpointing(counter)
    if load is not None:
        accelerator.load_state(str(load))
    losses = []
    for epoch in range(first, last):
        is_resumed = epoch == first and load is not None
        for batch in accelerator.skip_first_batches(loader, skip) if is_resumed else loader:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            counter.batches += 1
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if save is not None and epoch == last - 1 and skip and counter.batches % 6 == skip:
                break
    if save is not None:
        accelerator.save_state(str(save))
    return [*losses, optimizer.param_groups[0]["lr"], float(counter.batches)]


def run_epochs(rank: int, world_size: int, plan: Any, *args: Any) -> list[float]:
    with accelerate_process(rank, world_size):
        return epochs(Accelerator(plan=plan), *args)


@pytest.mark.parametrize(
    ("skip", "plan"),
    [
        (3, SHARDED),
        pytest.param(0, SHARDED, marks=pytest.mark.soak),
        pytest.param(0, None, marks=pytest.mark.soak),
        pytest.param(3, None, marks=pytest.mark.soak),
    ],
)
def test_a_loop_that_is_resumed_continues_as_if_it_had_not_been_interrupted(
    two: RankPool, tmp_path: Path, plan: Any, skip: int
) -> None:
    whole = two.run(run_epochs, plan, 0, 3, skip)
    before = two.run(run_epochs, plan, 0, 2, skip, None, tmp_path / "state")
    after = two.run(run_epochs, plan, 1 if skip else 2, 3, skip, tmp_path / "state")
    for rank in range(2):
        assert before[rank][:-2] + after[rank] == whole[rank]


def _weights(rank: int, world_size: int, plan: Any, folder: Path) -> list[Tensor]:
    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=plan)
        model = normalized_network()
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.register_for_checkpointing(Counter())
        accelerator.load_state(str(folder))
        moments = [entry["exp_avg"] for entry in optimizer.optimizer.state.values()]
        whole = [m.full_tensor() if hasattr(m, "full_tensor") else m for m in moments]
        return [value.clone() for value in (*accelerator.get_state_dict(model).values(), *whole)]


def test_a_state_loads_under_another_plan_and_number_of_ranks(two: RankPool, tmp_path: Path) -> None:
    two.run(run_epochs, SHARDED, 0, 1, 0, None, tmp_path / "state")
    sharded = two.run(_weights, SHARDED, tmp_path / "state")
    replicated = two.run(_weights, None, tmp_path / "state")
    alone = _weights(0, 1, None, tmp_path / "state")
    for result in (*sharded, *replicated):
        assert all(map(torch.equal, result, alone))


def test_automatic_names_keep_the_newest_folders(tmp_path: Path) -> None:
    with accelerate_process():
        configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = Accelerator(project_config=configuration)
        model = accelerator.prepare(nn.Linear(2, 2))
        for number in range(4):
            nn.init.constant_(model.weight, number)
            accelerator.save_state()
        nn.init.constant_(model.weight, 9)
        accelerator.load_state()
        assert model.weight[0, 0] == 3
        names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert names == ["checkpoint_2", "checkpoint_3"]
        configuration.iteration = 3
        with pytest.raises(InputError, match=r"checkpoint_3 exists: set accelerator\.project_configuration\.iteration"):
            accelerator.save_state()


def test_a_state_that_accelerate_has_written_loads(tmp_path: Path) -> None:
    with accelerate_process():
        theirs = accelerate.Accelerator()
        model = network()
        model, optimizer = theirs.prepare(model, torch.optim.Adam(model.parameters()))
        theirs.backward(model(samples()[:4][0]).sum())
        optimizer.step()
        theirs.save_state(str(tmp_path))
        saved = {name: value.clone() for name, value in model.state_dict().items()}
    with accelerate_process():
        accelerator, model = Accelerator(), network()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        accelerator.load_state(str(tmp_path))
        assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
        assert len(optimizer.state) == 6


def test_hooks_of_states_get_models_and_weights(tmp_path: Path) -> None:
    with accelerate_process():
        accelerator, model = Accelerator(), network()
        calls: list[Any] = []
        prepared = accelerator.prepare(model)
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: calls.append((models, list(weights[0]), folder))
        )
        accelerator.register_load_state_pre_hook(lambda models, folder: calls.append((models, folder)))
        accelerator.save_state(str(tmp_path))
        accelerator.load_state(str(tmp_path))
        assert calls == [([model], list(prepared.state_dict()), str(tmp_path)), ([model], str(tmp_path))]


def test_states_that_cannot_be_saved_or_loaded_are_refused_in_one_line(tmp_path: Path) -> None:
    with accelerate_process():
        accelerator = Accelerator()
        with pytest.raises(InputError, match="save_state needs a folder"):
            accelerator.save_state()
        with pytest.raises(InputError, match="is no folder"):
            accelerator.load_state(str(tmp_path / "none"))
        with pytest.raises(InputError, match="has no checkpoint: give a folder that save_state has written"):
            accelerator.load_state(str(tmp_path))
        accelerator.prepare(network(), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
        with pytest.raises(InputError, match="a parameter of no prepared model"):
            accelerator.save_state(str(tmp_path / "a"))
        accelerator._optimizers.clear()
        accelerator.save_state(str(tmp_path / "b"))
        accelerator.register_for_checkpointing(Counter())
        with pytest.raises(InputError, match="has 0 objects, but this script has 1"):
            accelerator.load_state(str(tmp_path / "b"))
        accelerator._custom_objects[0].batches = object()
        with pytest.raises(MeshwrightError, match="object"):
            accelerator.save_state(str(tmp_path / "c"))


def _whole_model(rank: int, world_size: int, folder: Path) -> None:
    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=SHARDED)
        model = accelerator.prepare(network())
        accelerator.save_model(model, str(folder))
        accelerator.wait_for_everyone()
        changed = {name: value + 1 for name, value in accelerator.get_state_dict(model).items()}
        model.load_state_dict(changed)
        for name, value in accelerator.get_state_dict(model).items():
            assert torch.equal(value, changed[name])


def test_a_sharded_model_is_saved_whole_and_loads_into_the_plain_model(two: RankPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    two.run(_whole_model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in network().state_dict().items():
        assert torch.equal(saved[name], value)
