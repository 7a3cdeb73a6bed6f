"""The script of plotly, from the installed Python package, as pages embed it: compressed, because it has 4.8 MB, and as
base64. The page's own script inflates it in the browser."""

import base64
import gzip
from functools import cache
from importlib.resources import files

from meshwright.errors import InputError


def check_plotly() -> None:
    """Raises an `InputError` if plotly, which comes with the extra `pages`, is not installed."""
    try:
        import plotly  # noqa: F401
    except ImportError as error:
        raise InputError(f'pages need the package plotly ({error}): pip install "meshwright[pages]"') from None


@cache
def compressed_plotly() -> str:
    """Returns plotly's script as base64 of gzip."""
    check_plotly()
    script = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(script, compresslevel=9, mtime=0)).decode()
