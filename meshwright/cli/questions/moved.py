"""Questions that are asked with options of `meshwright plan`, which are commands of `meshwright ask` now. The options
are kept for one version."""

from meshwright.cli.questions.plan_questions import PlanQuestion
from meshwright.cli.text import print_message
from meshwright.errors import InputError


def check_moved(question: PlanQuestion) -> bool:
    """Whether options of `plan` ask a question. Raises an `InputError` if they do not fit together."""
    asked = {"--batch": question.batch, "--sweep": question.sweep, "--for": question.goal, "--explain": question.plans}
    names = [name for name, value in asked.items() if value is not None]
    if len(names) > 1:
        raise InputError(f"{names[0]} and {names[1]} are two questions: ask one after the other")
    needed = {
        "--what-if": (("--sweep",), question.what_if or None),
        "--price": (("--sweep", "--for"), question.price),
        "--deadline": (("--for",), question.deadline),
        "--budget": (("--for",), question.budget),
        "--epochs": (("--for",), question.epochs),
        "--tokens": (("--for",), question.tokens),
        "--samples": (("--for",), question.samples),
        "--clusters": (("--for",), question.clusters),
    }
    for name, (others, value) in needed.items():
        if value is not None and not set(others) & set(names):
            raise InputError(f"{name} belongs to {others[0]}: add {others[0]}, or leave out {name}")
    if question.batch is not None and question.batch != "max":
        raise InputError(
            f"--batch {question.batch}: write meshwright ask batch JOB for the largest that fits; a batch is set with"
            " --set train.global_batch=N, or with --global-batch N for a model"
        )
    return bool(names)


def say_where(question: PlanQuestion, job: str) -> None:
    """Prints one line with the command that the question has become."""
    old, new = "--batch max", f"batch {job}"
    if question.sweep is not None:
        old, new = "--sweep", f"sweep {job} {question.sweep}"
    elif question.goal is not None:
        old, new = "--for", f"for {job} {question.goal}"
    elif question.plans is not None:
        old, new = "--explain", f"explain {job} {question.plans[0]} {question.plans[1]}"
    print_message(
        f"plan {old} is now `meshwright ask {new}`, with the same other options; the next version of plan has no {old}"
    )
