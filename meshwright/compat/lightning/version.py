"""Which versions of Lightning this package was tried with."""

from importlib.metadata import PackageNotFoundError, version

TRIED = "2.6.6"
_SERIES = "2.6."


def check_version() -> None:
    """Raises an `ImportError` of one line if Lightning is not installed, or has another minor version than the one that
    was tried."""
    install = f"pip install lightning=={TRIED}"
    try:
        installed = version("lightning")
    except PackageNotFoundError:
        raise ImportError(f"meshwright.compat.lightning needs the package lightning: {install}") from None
    if not installed.startswith(_SERIES):
        raise ImportError(
            f"lightning {installed} is installed, but meshwright.compat.lightning was tried with {TRIED} and needs"
            f" {_SERIES}x: {install}"
        )
