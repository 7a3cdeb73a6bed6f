"""The ready jobs, which come with the package: their names, what each of them trains, and the file that a word on the
command line stands for."""

import re
from functools import cache
from pathlib import Path

from meshwright.errors import InputError, did_you_mean
from meshwright.files.user_path import user_path

READY_JOBS = Path(__file__).parents[1] / "jobs"  # in the repository this is a link to the folder jobs at its root
MODEL_SOURCES = ("hf", "timm", "torchvision")


@cache
def ready_jobs() -> dict[str, Path]:
    """Returns the files of the ready jobs by name, sorted."""
    return {file.stem: file for file in sorted(READY_JOBS.glob("*.yaml"))}


def job_title(text: str) -> str:
    """Returns the first sentence of the comment at the top of a job file, without what stands in parentheses. It is
    empty if the file does not begin with a comment."""
    comment = re.match(r"(#.*\n)*", text)
    assert comment is not None
    words = " ".join(line.removeprefix("#").strip() for line in comment[0].splitlines())
    sentence = re.split(r"\. ", re.sub(r" \([^)]*\)", "", words), maxsplit=1)[0]
    return sentence.strip().removesuffix(".")


def is_model_name(word: str) -> bool:
    """Returns whether the word names a model of a library, such as `hf:llama`, instead of a job. A file of that name
    wins."""
    return word.partition(":")[0] in MODEL_SOURCES and ":" in word and not Path(word).is_file()


def find_job(word: str) -> Path:
    """Returns the file of the job that the user means: the path as it is written, or the ready job of that name if
    there is no such file. Raises an `InputError` for a bare word that is neither."""
    path = user_path(word, "JOB")
    if is_model_name(word):
        raise InputError(f"{word} is a model, not a job: write one with `meshwright init {word}`, then use job.yaml")
    if path.is_file() or "/" in word or path.suffix:
        return path
    if word not in ready_jobs():
        raise InputError(
            f"'{word}' is no job file, and no ready job has this name{did_you_mean(word, ready_jobs())}"
            " (`meshwright jobs` lists them)"
        )
    return ready_jobs()[word]


def complete_job(incomplete: str) -> list[tuple[str, str]]:
    """Returns the ready jobs whose names begin with `incomplete`, each with its title, for shells that complete words.
    Where there are none, shells complete the names of files."""
    return [(name, job_title(file.read_text())) for name, file in ready_jobs().items() if name.startswith(incomplete)]


def complete_job_or_model(incomplete: str) -> list[tuple[str, str]]:
    """Returns what `complete_job` does, and the beginnings of the names of models."""
    sources = [(f"{source}:", "a model of this library") for source in MODEL_SOURCES]
    return complete_job(incomplete) + [item for item in sources if item[0].startswith(incomplete)]
