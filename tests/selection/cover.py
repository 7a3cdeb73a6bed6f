"""What was run, as tables: tests by folder, and the axes of plans that were trained with which models and precisions.

Axes, models and precisions are read from the names of the cases of matrices: `[gpt-S2P2 twice]` and
`[llama-shard-bf16]`. A case that names no precision is one in fp32 or fp64, as the matrices of proofs are."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.selection import skips

AXES = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
MODELS = (
    *("mnist", "vgg", "resnet", "gpt", "bert", "two_tower", "multitask", "mixture"),
    *("mixtral", "qwen", "llama", "gpt2", "t5", "vit", "encoder", "swin"),
)
PRECISIONS = ("fp32, fp64", "bf16", "fp16", "fp8")
_ROOMS = ("tests/checkpoint/", "tests/parallel/", "tests/proof/", "tests/train/")  # that train under plans
_SIZES = re.compile(r"\b(?:[RSCTPE]\d+)+\b")  # of a case of the matrix


def cover_table(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yields the lines of the tables, and after them those with the reasons for what was skipped."""
    reports = list(reports)
    yield from _by_folder(reports)
    yield from _by_axis(report.nodeid for report in reports if report.passed and report.nodeid.startswith(_ROOMS))
    for reason, number in Counter(filter(None, map(skips.reason, reports))).most_common():
        yield f"skipped {number}: {reason}"


def _by_folder(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for report in reports:
        parts = Path(report.nodeid.partition("::")[0]).relative_to("tests").parts
        folder = "/".join(parts[: 2 if parts[0] == "compat" else 1]) if len(parts) > 1 else "its own files"
        counts.setdefault(folder, Counter())[report.outcome] += 1
    width = max(map(len, counts), default=0)
    for folder, count in sorted(counts.items()):
        skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
        yield f"{folder:{width}} {count['passed']:5} passed{skipped}"


def _by_axis(names: Iterable[str]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = {}
    for name in names:
        case = name.partition("[")[2].removesuffix("]")
        columns = [column for column in (*MODELS, *PRECISIONS[1:]) if re.search(rf"\b{column}\b", case)]
        if not set(columns) & set(PRECISIONS):
            columns.append(PRECISIONS[0])
        for axis in axes_of(case):
            counts.setdefault(axis, Counter()).update(columns)
    for axis in AXES:
        if axis in counts:
            numbers = [f"{column} {counts[axis][column]}" for column in (*MODELS, *PRECISIONS) if counts[axis][column]]
            yield f"{axis:9} with {' · '.join(numbers)}"


def axes_of(case: str) -> list[str]:
    """The axes that the name of a case has, as words or as the sizes of a case of the matrix."""
    letters = {letter for sizes in _SIZES.findall(case) for letter in re.sub(r"\d", "", sizes)}
    return [axis for axis in AXES if axis[0].upper() in letters or re.search(rf"\b{axis}\b", case)]
