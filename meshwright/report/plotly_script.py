"""The script of plotly, from the installed Python package, as pages embed it: compressed, because it has 4.8 MB, and as
base64. The page's own script inflates it in the browser."""

import base64
import gzip
from functools import cache
from importlib.resources import files


@cache
def compressed_plotly() -> str:
    """Returns plotly's script as base64 of gzip."""
    script = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(script, compresslevel=9, mtime=0)).decode()
