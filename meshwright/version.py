"""The version of this package, also where it is imported from a folder and not installed, and the versions of torch
that it was tried with. Nothing here imports torch."""

import sys
import warnings

VERSION = "0.1.0"
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)  # as pyproject.toml has them


def untried_torch() -> str | None:
    """Returns a line about the version of torch if torch is imported and this version was not tried; None otherwise."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    if OLDEST_TORCH <= tuple(map(int, numbers)) <= NEWEST_TORCH:
        return None
    (major, minor), after = NEWEST_TORCH, NEWEST_TORCH[1] + 1
    oldest = ".".join(map(str, OLDEST_TORCH))
    return (
        f"torch {version} is installed, but Meshwright {VERSION} uses private interfaces of torch and was tried with"
        f' {oldest} to {major}.{minor}: if something fails, pip install "torch>={oldest},<{major}.{after}"'
    )


def warn_of_untried_torch() -> None:
    """Warns with one line if torch is imported in a version that was not tried."""
    if line := untried_torch():
        warnings.warn_explicit(line, RuntimeWarning, "meshwright", 0)


def note_untried_torch(error: Exception) -> None:
    """Adds a note to an error that a version of torch may have caused which was not tried."""
    if line := untried_torch():
        error.add_note(line)
