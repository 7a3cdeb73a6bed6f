"""The manifest of a checkpoint: the size and checksum of every file, with which damage is detected, and what the
trainer needs to know before it loads the checkpoint. It contains a checksum of itself and, if a key is set, a
signature."""

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from meshwright.errors import CheckpointError
from meshwright.files.regular_file import open_regular_file
from meshwright.files.storage import write_atomically
from meshwright.files.trust import environment_key, is_signed_by, sign
from meshwright.numbers.limits import Parts, Samples

MANIFEST = "manifest.json"
_LARGEST_MANIFEST_BYTES = 64 * 1024 * 1024
_FORMAT = 2  # of manifests with a checksum of themselves; older ones do not have this field

Position = tuple[NonNegativeInt, NonNegativeInt]  # an epoch and the index of a batch in it


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileChecksum(_Section):
    """Size and checksum of one file."""

    bytes: NonNegativeInt
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class AboutChange(_Section):
    """The fields of `train/shares/controller.py: Change`."""

    before: list[PositiveInt]
    after: list[PositiveInt]
    seconds: list[PositiveFloat]
    log_seconds: list[FiniteFloat]
    windows: NonNegativeInt


class AboutSpeeds(_Section):
    """The fields of `train/shares/controller.py: SpeedState`."""

    speeds: list[PositiveFloat]
    measured: list[PositiveFloat]
    samples: list[PositiveInt]
    noise: NonNegativeFloat
    patience: PositiveInt
    wait: NonNegativeInt
    quiet: NonNegativeInt
    move: list[int]
    move_before: list[int]
    elasticities: list[Annotated[float, Field(ge=0, le=1)]]
    change: AboutChange | None

    def lists(self) -> list[list[Any]]:
        """The lists with one value for each rank, of which some may be empty."""
        names = {"speeds", "measured", "samples", "move", "move_before", "elasticities"}
        of_change = self.change.model_dump(exclude={"windows"}) if self.change else {}
        return [value for value in self.model_dump(include=names).values() if value] + list(of_change.values())


class AboutShares(_Section):
    """Adaptive shares: those of the next batch by data rank, the changes that were decided and begin later (the step
    of the decision, the number of the first batch, the shares), the step of the last decision, and the speeds."""

    samples: list[Samples] = Field(min_length=1)
    changes: list[tuple[NonNegativeInt, NonNegativeInt, list[Samples]]] = []
    decided: NonNegativeInt
    speeds: AboutSpeeds

    @model_validator(mode="after")
    def _has_the_same_ranks(self) -> Self:
        lists = [*self.speeds.lists(), *(samples for _, _, samples in self.changes)]
        if any(len(of_ranks) != len(self.samples) for of_ranks in lists):
            raise ValueError("shares are of different numbers of ranks")
        return self


class About(_Section):
    """What is allowed in the field `about` of a manifest.

    `position` is the epoch and the index of the batch that come next; as every batch is one step, the index is at most
    `step`. `parts` is the number of fixed parts of the data set, `stream` the state that a stream had before the last
    batch and a digest of this batch, `plan` the plan of the run, `loss` the last loss, `evaluated` the step of the last
    evaluation and its metrics, `best` the step of the best checkpoint and its metric, `left_out` the batches that are
    not trained on, `skipped` the number of updates that were left out, `losses` those that decide whether the next
    one is a spike, `shares` those of a plan with adaptive ones. Only runs with parameter servers have `clocks` (worker,
    clock, epoch and batch of each), `workers` and `staleness`.
    """

    model_config = ConfigDict(strict=True)  # a number as a text would not be one for the trainer

    step: NonNegativeInt
    position: Position
    seed: NonNegativeInt
    parts: Parts | None = None
    stream: tuple[dict[str, Any], str] | None = None
    plan: dict[str, Any] | None = None
    loss: float | None = None
    evaluated: tuple[NonNegativeInt, dict[str, float]] | None = None
    best: tuple[NonNegativeInt, float] | None = None
    left_out: list[Position] = []
    losses: list[float] = []
    shares: AboutShares | None = None
    skipped: NonNegativeInt = 0
    clocks: list[tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt]] = []
    workers: PositiveInt | None = None
    staleness: list[float] | None = Field(default=None, min_length=4, max_length=4)

    @model_validator(mode="after")
    def _position_is_reached(self) -> Self:
        if self.position[1] > self.step:
            raise ValueError(f"batch {self.position[1]} of an epoch cannot come next after {self.step} steps")
        return self


class Manifest(_Section):
    """The contents of a checkpoint's manifest.json. `files` has every file but the manifest itself. `about` holds what
    the trainer needs to know before it loads, with the fields of `About`."""

    step: NonNegativeInt
    files: dict[str, FileChecksum] = Field(min_length=1)
    about: dict[str, Any]

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        try:
            about = About.model_validate_json(json.dumps(self.about))
        except ValidationError as error:
            raise ValueError(_first_problem(error)) from None
        for name, value in about.model_dump(mode="json").items():
            self.about.setdefault(name, value)  # every field is there when the trainer looks for it
        if self.about["step"] != self.step:
            raise ValueError("its two step numbers differ")
        for name in self.files:
            if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII) or name in (".", "..", MANIFEST):
                raise ValueError(f"{name!r:.50} is not the name of a file of a checkpoint")
        return self


def checkpoint_name(step: int) -> str:
    """The name of the folder of a run's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of the checkpoint in a folder of this name; None if `checkpoint_name` does not give this name."""
    digits = name.removeprefix("step-")
    step = int(digits) if re.fullmatch(r"\d{8,20}", digits, re.ASCII) else None
    return step if step is not None and checkpoint_name(step) == name else None


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints, valid or not, by step and from the oldest to the newest."""
    steps = ((step_of(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted((step, path) for step, path in steps if step is not None))


def file_checksum(path: Path) -> FileChecksum:
    """Computes the size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileChecksum(bytes=file.tell(), sha256=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest with its checksum, and with a signature if the environment has a key (files/trust.py)."""
    write_atomically(folder / MANIFEST, signed_text({"format": _FORMAT, **manifest.model_dump()}))


def signed_text(contents: dict[str, Any]) -> str:
    """Returns JSON text with these fields, their checksum, and a signature if the environment has a key."""
    data, key = _canonical(contents), environment_key()
    signature = {} if key is None else {"signature": sign(key, data)}
    checksum = hashlib.sha256(data).hexdigest()
    return json.dumps({**contents, "checksum": checksum, **signature}, indent=1)  # Python reads a loss that is NaN


def read_manifest(folder: Path) -> Manifest:
    """Reads a manifest. Raises a `CheckpointError` if it is damaged, contradicts itself, or is not signed with the key
    of the environment, if there is one."""
    try:
        contents = json.loads(_read_small_file(folder / MANIFEST))
    except OSError as error:
        raise CheckpointError(f"{folder}: its {MANIFEST} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{folder}: its {MANIFEST} is damaged") from None
    if not isinstance(contents, dict) or not isinstance(contents.get("files"), dict):
        raise CheckpointError(f"{folder}: its {MANIFEST} is damaged")
    contents = check_signed(f"{folder}: its {MANIFEST}", contents)
    try:
        return Manifest.model_validate(contents)
    except (ValidationError, RecursionError) as error:
        reason = _first_problem(error) if isinstance(error, ValidationError) else "it is nested too deeply"
        raise CheckpointError(f"{folder}: its {MANIFEST} is damaged: {reason}") from None


def _first_problem(error: ValidationError) -> str:
    """The first problem in one line, with the field that has it, such as `loss: Input should be a valid number`."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{place:.100}: {message}" if place else message


def _read_small_file(path: Path) -> str:
    with open_regular_file(path) as file:
        content = file.read(_LARGEST_MANIFEST_BYTES + 1)
    if len(content) > _LARGEST_MANIFEST_BYTES:
        raise OSError(0, f"it has more than {_LARGEST_MANIFEST_BYTES:,} bytes")
    return content.decode()


def check_signed(what: str, contents: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that `signed_text` was given, without `format`, after checking checksum and signature. Raises
    a `CheckpointError` that begins with `what`."""
    fields = {name: value for name, value in contents.items() if name not in ("checksum", "signature")}
    data, key = _canonical(fields), environment_key()
    if contents.get("checksum") != hashlib.sha256(data).hexdigest():
        raise CheckpointError(f"{what} is damaged: it does not have the checksum that it says")
    signature = contents.get("signature")
    if key is not None and not (isinstance(signature, str) and is_signed_by(key, data, signature)):
        problem = "is not signed" if signature is None else "is signed with another key or was changed"
        raise CheckpointError(f"{what} {problem}, and MESHWRIGHT_KEY or MESHWRIGHT_KEY_FILE is set")
    return {name: value for name, value in fields.items() if name != "format"}


def _canonical(contents: dict[str, Any]) -> bytes:
    """The bytes that checksum and signature are computed from. They are the same before writing and after reading,
    because every value in `contents` is one that JSON keeps."""
    return json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()
