"""The jobs on pictures: errors without data, learning from generated data, and fine-tuning."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_initialized_model, build_metrics
from meshwright.train.job_session import build_session
from meshwright.workloads import vision
from tests.train.one_process import world

JOBS = Path(__file__).parents[3] / "jobs"
NAMES = ("vgg16", "resnet18", "resnet50", "deeplab")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))  # one for all tests


def job(name: str, *settings: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", settings)


def losses_of(small: Job, steps: int) -> list[float]:
    session = build_session(small, Plan(), world(), lambda activity: None)
    batches = session.batches(build_data(small)[0], global_batch=small.train.global_batch)
    return [float(session.step(next(batches))) for _ in range(steps)]


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_job_without_data_names_both_remedies(name: str) -> None:
    with pytest.raises(InputError, match=r"--set data.root=FOLDER.*--set data.synthetic=true"):
        build_data(job(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_synthetic_section_makes_a_job_small(name: str) -> None:
    full, small = job(name), job(name, "data.synthetic=true", "train.global_batch=6")
    assert small.train.global_batch == 6  # a value that the user sets is kept
    assert small.data.train.arguments["size"] < full.data.train.arguments["size"]
    train, evaluation = build_data(small)
    image, target = train[0]
    assert image.shape[-1] == small.data.train.arguments["size"]
    scores = torch.randn(2, small.model.arguments["classes"], *target.shape if name == "deeplab" else ())
    truth = torch.as_tensor(evaluation[0][1])
    measured = {name: metric(scores, torch.stack([truth] * 2)) for name, metric in build_metrics(small).items()}
    assert set(measured) == set(small.metrics)


def test_vgg16_has_the_settings_of_the_usual_run() -> None:
    full = job("vgg16")
    assert (full.train.global_batch, full.train.epochs) == (256, 90)
    assert full.optimizer.arguments == {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
    assert full.schedule is not None
    assert full.schedule.arguments["milestones"]
    assert full.data.workers > 0
    assert full.data.pin_memory
    assert full.checkpoint.best == "accuracy"


@pytest.mark.soak
def test_resnet18_learns_the_generated_pictures() -> None:
    losses = losses_of(job("resnet18", "data.synthetic=true"), 9)
    assert sum(losses[-4:]) / 4 < 0.4 * losses[0]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "share"), [("vgg16", 0.6), ("resnet50", 0.4), ("deeplab", 0.5)])
def test_other_models_learn_the_generated_pictures(name: str, share: float) -> None:
    losses = losses_of(job(name, "data.synthetic=true"), 20)
    assert sum(losses[-5:]) / 5 < share * losses[0]


def test_resnet18_is_fine_tuned_with_a_new_head(tmp_path: Path) -> None:
    file = tmp_path / "pretrained.pt"
    pretrained = vision.resnet18(classes=7).state_dict()
    torch.save(pretrained, file)
    small = job(
        "resnet18",
        "data.synthetic=true",
        "data.train.size=16",
        "train.global_batch=8",
        f"train.weights.path={file}",
        "train.weights.skip=[fc.*]",
        "train.freeze=[conv1, bn1, layer1, layer2, layer3]",
    )
    start = build_initialized_model(small).state_dict()
    assert start["fc.weight"].shape == (4, 512)
    assert all(torch.equal(start[name], value) for name, value in pretrained.items() if not name.startswith("fc."))
    session = build_session(small, Plan(), world(), lambda activity: None)
    batches = session.batches(build_data(small)[0], global_batch=8)
    for _ in range(3):
        session.step(next(batches))
    after: dict[str, Any] = session.state_dict()
    for name, value in start.items():
        trained = name.startswith(("layer4", "fc"))
        assert torch.equal(after[name], value) != trained, name


def test_the_loss_is_the_mean_without_skipped_pictures(tmp_path: Path) -> None:
    """If one picture of a batch is damaged, the loss of the step is the mean over the others."""
    from meshwright.files.cache import cache_folder, fill_once
    from meshwright.workloads.images.pictures_generated import make_image_folder

    root = fill_once(cache_folder() / "damaged", lambda folder: make_image_folder(folder, classes=4, samples=8))
    damaged = next((root / "train").rglob("*.JPEG"))
    damaged.write_bytes(b"no picture")
    small = job("resnet18", "data.synthetic=true", "data.damaged=skip", "train.global_batch=8")
    data = small.data.model_copy(update={"synthetic": False, "root": str(root)})
    small = small.model_copy(update={"data": data})
    session = build_session(small, Plan(), world(), lambda activity: None)
    with pytest.warns(UserWarning, match=str(damaged)):
        batch = next(session.batches(build_data(small)[0], global_batch=8))
    images, labels = batch.microbatches[0].data
    assert (labels >= 0).sum() == 7
    model = build_initialized_model(small).train()
    sample_losses = torch.nn.functional.cross_entropy(model(images), labels, reduction="none")
    assert float(session.step(batch)) == pytest.approx(float(sample_losses.detach().sum() / 7), rel=1e-5)
