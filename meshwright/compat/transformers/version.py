"""Which versions of transformers and accelerate this package was tried with."""

from importlib.metadata import PackageNotFoundError, version

TRIED = {"transformers": "5.22.2", "accelerate": "1.15.0"}
_SERIES = {"transformers": "5.22.", "accelerate": "1.15."}


def check_version() -> None:
    """Raises an `ImportError` of one line if transformers or accelerate is not installed, or has another minor version
    than the one that was tried."""
    for package, tried in TRIED.items():
        install = f"pip install {package}=={tried}"
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise ImportError(f"meshwright.compat.transformers needs the package {package}: {install}") from None
        if not installed.startswith(_SERIES[package]):
            raise ImportError(
                f"{package} {installed} is installed, but meshwright.compat.transformers was tried with {tried} and"
                f" needs {_SERIES[package]}x: {install}"
            )
