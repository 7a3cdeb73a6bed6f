"""Who wrote a run folder. `train` signs job.yaml and plan.yaml with the user's key (files/trust.py), in origin.json.
Whatever imports what a job.yaml names executes code, so it reads the job with `open_run`, which refuses a folder that
this user did not write, unless the user trusts it."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.errors import InputError
from meshwright.files.regular_file import open_regular_file
from meshwright.files.trust import accepted_keys, is_signed_by, sign, user_key
from meshwright.files.yaml_file import parse_mapping
from meshwright.job import Job, load_job, load_plan
from meshwright.plan import Plan

ORIGIN_FILE = "origin.json"
_LARGEST_FILE_BYTES = 4 * 2**20  # a job or plan has at most 2**20 characters (files/yaml_file.py), each up to 4 bytes
_MOST_NAMED_IMPORTS = 20


class _Origin(BaseModel):
    """The content of origin.json. `signature` covers job.yaml and plan.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    signature: str


def origin_text(job: str, plan: str) -> str | None:
    """Returns the text of origin.json for the texts of job.yaml and plan.yaml; None if this user has no key."""
    key = user_key()
    return None if key is None else _Origin(signature=sign(key, _signed_bytes(job, plan))).model_dump_json()


def open_run(path: Path, trust: bool, settings: Sequence[str] = ()) -> tuple[Job, Plan]:
    """Returns the job and the plan of a run folder, to execute what the job imports. Raises an `InputError` if this
    user did not write them and does not `trust` them. `settings` override fields of the job."""
    job_file, plan_file = path / "job.yaml", path / "plan.yaml"
    job, plan = read_run_file(job_file), read_run_file(plan_file)
    if not trust:
        _check_origin(path, job, plan)
    return load_job(job_file, settings, text=job), load_plan(plan_file, text=plan)


def read_run_file(file: Path) -> str:
    """Returns the text of a file that `train` wrote. Raises an `InputError` if it is a symbolic link, which could lead
    anywhere, or not a regular file, whose reading might not end."""
    try:
        with open_regular_file(file, follow_link=False) as stream:
            content = stream.read(_LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            f"{file.parent} is no run folder, it has no {file.name}: name one that `train` wrote"
        ) from None
    except OSError as error:
        reason = "it is a symbolic link" if file.is_symlink() else error.strerror
        raise InputError(f"{file} cannot be read: {reason}") from None
    if len(content) > _LARGEST_FILE_BYTES:
        raise InputError(f"{file} has more than {_LARGEST_FILE_BYTES:,} bytes: `train` did not write it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{file} cannot be read: {error}") from None


def _check_origin(path: Path, job: str, plan: str) -> None:
    """Raises an `InputError` that names the imports of the job if the run folder has no valid signature."""
    reason = _why_foreign(path, job, plan)
    if reason is None:
        return
    imports = sorted(set(_import_paths(parse_mapping(job, path / "job.yaml", "job"))))
    named = ", ".join(imports[:_MOST_NAMED_IMPORTS])
    more = f" and {len(imports) - _MOST_NAMED_IMPORTS} more" if len(imports) > _MOST_NAMED_IMPORTS else ""
    raise InputError(
        f"{path} {reason}: its job.yaml imports {named or 'nothing'}{more}, which executes code; look at it and add"
        " --trust"
    )


def _why_foreign(path: Path, job: str, plan: str) -> str | None:
    """Returns why the run does not count as written by this user; None if it does."""
    if not os.path.lexists(path / ORIGIN_FILE):
        return "has no origin.json, as runs of earlier versions, so it is unknown who wrote it"
    try:
        origin = _Origin.model_validate_json(read_run_file(path / ORIGIN_FILE))
    except (ValidationError, InputError):
        return "has a damaged origin.json, so it is unknown who wrote it"
    if any(is_signed_by(key, _signed_bytes(job, plan), origin.signature) for key in accepted_keys()):
        return None
    return "was not signed with your key: somebody else wrote it, or it was changed, or the key is another one now"


def _signed_bytes(job: str, plan: str) -> bytes:
    """Returns the bytes that a signature covers. The length of the job says where the plan begins."""
    return f"meshwright run\n{len(job)}\n{job}{plan}".encode()


def _import_paths(value: Any) -> Iterator[str]:
    """Yields the import paths in a raw job: every `call` in it, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get("call"), str):
            yield value["call"]
        for inner in value.values():
            yield from _import_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _import_paths(inner)
