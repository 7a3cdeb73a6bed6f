"""How the sentences of causes write names, ranks, rows and numbers."""

from collections.abc import Iterable, Sequence


def list_names(names: Iterable[str], most: int = 3) -> str:
    """The first `most` names as text, with the number of further names."""
    listed = list(names)
    if len(listed) > most:
        return f"{', '.join(listed[:most])} and {len(listed) - most} more"
    return _join(listed)


def list_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0 to 7`."""
    listed = sorted(set(ranks))
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {list_numbers(listed)}"


def list_rows(rows: Iterable[int]) -> str:
    listed = sorted(set(rows))
    if len(listed) == 1:
        return f"row {listed[0]}"
    return f"rows {list_numbers(listed)}"


def list_numbers(numbers: Sequence[int], most: int = 6) -> str:
    """Numbers as text, as ranges where they follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    if len(texts) > most:
        return f"{', '.join(texts[:most])} and more ({len(numbers)} in all)"
    return _join(texts)


def number(value: float) -> str:
    """A number with the digits that a reader compares."""
    return f"{value:.6g}"


def _join(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else "nothing"


def may_follow(names: Sequence[str]) -> str:
    """What is said of gradients that differ beside those that a cause explains; nothing if there are none."""
    return (
        f". The other gradients that differ ({list_names(names)}) are computed after it and may follow" if names else ""
    )
