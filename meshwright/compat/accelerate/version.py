"""Which versions of Accelerate this package was tried with."""

from importlib.metadata import PackageNotFoundError, version

TRIED = "1.15.0"
_SERIES = "1.15."


def check_version() -> None:
    """Raises an `ImportError` of one line if Accelerate is not installed, or has another minor version than the one
    that was tried."""
    install = f"pip install accelerate=={TRIED}"
    try:
        installed = version("accelerate")
    except PackageNotFoundError:
        raise ImportError(f"meshwright.compat.accelerate needs the package accelerate: {install}") from None
    if not installed.startswith(_SERIES):
        raise ImportError(
            f"accelerate {installed} is installed, but meshwright.compat.accelerate was tried with {TRIED} and needs"
            f" {_SERIES}x: {install}"
        )
