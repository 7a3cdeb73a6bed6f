"""The page of the Python interface, from signatures and docstrings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import meshwright
from documentation.reference.markdown import page
from meshwright.audit.result import Audit
from meshwright.proof.proof import Proof
from meshwright.simulator.predict import Prediction

_INTRODUCTION = (
    "The names of `import meshwright as mw`, and the values that they return. torch is imported when the first of them "
    "is used. [Your own training loop](../loops.md) shows how they work together."
)


def python_page() -> str:
    names = [name for name in meshwright.__all__ if not name.startswith("__")]
    functions = [name for name in names if not inspect.isclass(getattr(meshwright, name))]
    classes = [name for name in names if inspect.isclass(getattr(meshwright, name))]
    parts = [part for name in functions for part in _function(f"mw.{name}", getattr(meshwright, name), "##")]
    parts += [part for name in classes for part in _class(f"mw.{name}", getattr(meshwright, name))]
    for kind, function in ((Prediction, "predict"), (Proof, "prove"), (Audit, "compare")):
        parts += list(_class(kind.__name__, kind, f"What `mw.{function}` returns."))
    return page("Python", "the docstrings of `meshwright.__all__`", _INTRODUCTION, *parts)


def _function(name: str, function: Any, level: str) -> Iterator[str]:
    yield f"{level} `{name}`"
    yield f"<!-- not run: a signature -->\n```python\n{name}{_signature(function)}\n```"
    yield from _docstring(function)


def _class(name: str, kind: type, words: str = "") -> Iterator[str]:
    yield f"## `{name}`"
    yield words
    yield from _docstring(kind)
    if is_dataclass(kind):
        lines = [f"{field}: {_plain(annotation)}" for field, annotation in kind.__annotations__.items()]
        yield "<!-- not run: a list of fields -->\n```python\n" + "\n".join(lines) + "\n```"
    for method, function in sorted(inspect.getmembers(kind, _is_method)):
        if not method.startswith("_") and function.__module__.startswith("meshwright") and function.__doc__:
            yield from _function(f"{name.removeprefix('mw.')}.{method}", function, "###")


def _is_method(member: Any) -> bool:
    return inspect.isfunction(member) or inspect.ismethod(member)


def _signature(function: Any) -> str:
    """The signature, one parameter per line if it is long."""
    signature = inspect.signature(function)
    text = _plain(str(signature))
    if len(text) <= 90:
        return text
    parameters, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        parameters.append(_plain(str(parameter)))
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {_plain(inspect.formatannotation(returned))}"
    return "(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){arrow}"


def _plain(annotation: Any) -> str:
    """An annotation without the names of modules."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"<function [\w.<>]+ at 0x\w+>", "…", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text).replace("~", "")


def _docstring(item: Any) -> Iterator[str]:
    """The paragraphs of a docstring; lines that begin with `>>>` or follow such a line are an example."""
    for paragraph in re.split(r"\n\n+", inspect.cleandoc(item.__doc__ or "")):
        if paragraph.lstrip().startswith(">>>"):
            example = inspect.cleandoc(paragraph)
            yield f"<!-- run by tests/documentation/test_docstrings.py -->\n```pycon\n{example}\n```"
        else:
            yield paragraph
