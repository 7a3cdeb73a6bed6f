"""Which versions of other libraries the packages for them were tried with."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


def check_versions(module: str, tried: Mapping[str, str]) -> None:
    """Raises an `ImportError` of one line if a library that `module` needs is not installed, or has another minor
    version than the one that was tried. `tried` has the version of each library."""
    for library, tried_version in tried.items():
        install = f"pip install {library}=={tried_version}"
        try:
            installed = version(library)
        except PackageNotFoundError:
            raise ImportError(f"{module} needs the package {library}: {install}") from None
        series = tried_version.rpartition(".")[0] + "."
        if not installed.startswith(series):
            raise ImportError(
                f"{library} {installed} is installed, but {module} was tried with {tried_version} and needs"
                f" {series}x: {install}"
            )
