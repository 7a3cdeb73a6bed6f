"""Sends a proof request to the ranks as a pickle file. A user's model may be defined in the script that is running, so
a rank first imports that script under another name, as multiprocessing does.

Reading a pickle executes code. Here that is intended: the file holds the user's own model, and the ranks are processes
of the same user on the same machine. Nobody else can write what the ranks read: only the user may open the file (mode
0600) and its temporary folder (`prove.work_folder`, mode 0700)."""

import io
import os
import pickle
from dataclasses import fields
from multiprocessing import current_process, spawn
from pathlib import Path
from types import FunctionType
from typing import Any

import cloudpickle
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from meshwright.errors import InputError
from meshwright.files.storage import writing
from meshwright.job import Job
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.proof.torch_private import new_parametrized
from meshwright.user.call import load

_PICKLING_ERRORS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


def write_request(request: ProofRequest, file: Path) -> None:
    """Writes the request. Raises InputError if a part of it cannot be pickled, or cannot be imported by the ranks."""
    try:
        pickled = _pickle(request)
    except _PICKLING_ERRORS as error:
        raise InputError(_describe_pickling_error(request.subject, error)) from error
    preparation = {key: value for key, value in spawn.get_preparation_data("rank").items() if key in _PREPARATION_KEYS}
    if b"__main__" not in pickled:
        preparation = {"sys_path": preparation["sys_path"]}
    elif not any(key.startswith("init_main") for key in preparation):
        raise InputError(
            "the model, loss or data is defined in an interactive session, which ranks cannot import: use a file"
        )
    with writing(file, len(pickled)), open(file, "wb", opener=_open_private) as stream:
        pickle.dump(preparation, stream)
        stream.write(pickled)


def _pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """A pickler for modules with parametrized weights too (weight norm, spectral norm). torch makes a class for each of
    them, which nobody can import, so the pickle names the module's own class and the parametrized weights. Functions
    inside functions of torch, which it registers as hooks of such modules, are pickled by value."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and is_parametrized(value):
            original: Any = type(value).__bases__[0]
            names = [name for name, _ in value.get_submodule("parametrizations").named_children()]
            return new_parametrized, (original, names), original.__getstate__(value)
        if (
            isinstance(value, FunctionType)
            and "<locals>" in value.__qualname__
            and value.__module__.startswith("torch.")
        ):
            return pickle.loads, (cloudpickle.dumps(value),)
        return NotImplemented


def _open_private(path: str, flags: int) -> int:
    """Opens a file that only this user may read and write, if it does not exist yet."""
    return os.open(path, flags, 0o600)


def read_request(file: Path) -> ProofRequest:
    """Imports the script that defines the model, if there is one, and reads the request."""
    with file.open("rb") as stream:
        preparation = pickle.load(stream)
        process: Any = current_process()
        process._inheriting = True  # a script without a guard would start ranks in every rank
        try:
            spawn.prepare(preparation)
            request = _Unpickler(stream).load()
        finally:
            del process._inheriting
    assert isinstance(request, ProofRequest)
    return request


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports classes with `load`, as jobs do. `load` makes the preparations that some libraries
    need, and its error names what is missing."""

    def find_class(self, module: str, name: str) -> Any:
        return load(f"{module}:{name}")


def check_main_guard() -> None:
    """Raises InputError if this process is a rank that is importing the script which calls prove()."""
    if getattr(current_process(), "_inheriting", False):
        raise InputError('ranks import the script that calls prove(): put the call below `if __name__ == "__main__":`')


# The keys of multiprocessing's data about the parent process that a rank needs.
_PREPARATION_KEYS = ("sys_path", "init_main_from_name", "init_main_from_path")


def _describe_pickling_error(subject: Job | UserModel, error: Exception) -> str:
    """Returns a message that names the field of the subject that cannot be pickled."""
    for field in fields(subject) if isinstance(subject, UserModel) else ():
        try:
            _pickle(getattr(subject, field.name))
        except _PICKLING_ERRORS as reason:
            reason_text = " ".join(str(reason).split())
            return (
                f"{field.name} cannot be sent to the ranks ({reason_text}): define it at the top level of a module,"
                " without lambdas, local functions and open files"
            )
    return f"the proof request cannot be sent to the ranks: {' '.join(str(error).split())}"
