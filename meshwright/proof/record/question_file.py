"""A question on its way to the ranks: pickled into a file. A user's model may be defined in the script that is running,
which a rank imports under another name before it reads the question, as multiprocessing does."""

import pickle
from dataclasses import fields
from multiprocessing import current_process, spawn
from pathlib import Path
from typing import Any

from meshwright.call import load
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.proof.question import OwnModel, Question

_CANNOT = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)


def write(question: Question, file: Path) -> None:
    """Raises InputError where something cannot be sent to other processes."""
    try:
        pickled = pickle.dumps(question)
    except _CANNOT as error:
        raise InputError(_why(question.subject, error)) from error
    preparation = {key: value for key, value in spawn.get_preparation_data("rank").items() if key in _NEEDED}
    if b"__main__" not in pickled:
        preparation = {"sys_path": preparation["sys_path"]}
    elif not any(key.startswith("init_main") for key in preparation):
        raise InputError(
            "the model, loss or data is defined in an interactive session, which ranks cannot import: use a file"
        )
    with file.open("wb") as stream:
        pickle.dump(preparation, stream)
        stream.write(pickled)


def read(file: Path) -> Question:
    with file.open("rb") as stream:
        preparation = pickle.load(stream)
        process: Any = current_process()
        process._inheriting = True  # a script without a guard would start ranks in every rank
        try:
            spawn.prepare(preparation)
            question = _Unpickler(stream).load()
        finally:
            del process._inheriting
    assert isinstance(question, Question)
    return question


class _Unpickler(pickle.Unpickler):
    """Imports as a job does: some libraries need a word before, and what is missing is told."""

    def find_class(self, module: str, name: str) -> Any:
        return load(f"{module}:{name}")


def check_guarded() -> None:
    """Refuses to start ranks while a rank imports the script that asks for it."""
    if getattr(current_process(), "_inheriting", False):
        raise InputError('ranks import the script that calls prove(): put the call below `if __name__ == "__main__":`')


_NEEDED = ("sys_path", "init_main_from_name", "init_main_from_path")


def _why(subject: Job | OwnModel, error: Exception) -> str:
    """Which part it is that cannot be pickled."""
    for field in fields(subject) if isinstance(subject, OwnModel) else ():
        try:
            pickle.dumps(getattr(subject, field.name))
        except _CANNOT as reason:
            said = " ".join(str(reason).split())
            return (
                f"{field.name} cannot be sent to the ranks ({said}): define it at the top level of a module, without"
                " lambdas, local functions and open files"
            )
    return f"the question cannot be sent to the ranks: {' '.join(str(error).split())}"
