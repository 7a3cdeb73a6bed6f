"""Published decoders by name: `decoder("llama3-8B")`, `decoder("gpt2", layers=2)`."""

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from meshwright.errors import InputError, did_you_mean
from meshwright.workloads.text.decoder import Decoder

_FILE = Path(__file__).with_suffix(".yaml")


def decoder(size: str | None = None, **overrides: Any) -> Decoder:
    """Returns a decoder of a published size, with `overrides` of its keywords. If `size` is None, `overrides` must hold
    all keywords that `Decoder` requires."""
    keywords = {**(published_keywords(size) if size is not None else {}), **overrides}
    parameters = inspect.signature(Decoder).parameters
    for name in keywords:
        if name not in parameters:
            raise InputError(f"a decoder has no '{name}'{did_you_mean(name, ['size', *parameters])}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in keywords]
    if missing:
        raise InputError(f"a decoder needs {', '.join(missing)}: give them, or a size such as size: gpt2")
    return Decoder(**keywords)


def published_keywords(size: str) -> dict[str, Any]:
    """Returns the keywords of `Decoder` for a published size."""
    sizes = published_sizes()
    if size not in sizes:
        raise InputError(f"there is no decoder of size '{size}'{did_you_mean(str(size), sizes)}")
    return {**_content()["families"][sizes[size]["family"]], **sizes[size]["keywords"]}


def published_sizes() -> dict[str, dict[str, Any]]:
    """Returns the entry of each size in decoder_sizes.yaml: its `family`, `keywords`, published number of `parameters`
    and `source`."""
    return dict(_content()["sizes"])


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(_FILE.read_text())
    return content
