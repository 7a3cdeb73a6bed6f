"""Every public function has an example in its docstring, which is right and is shown in docs/reference/python.md."""

import doctest
import inspect
from pathlib import Path

import pytest

import meshwright

REPOSITORY = Path(__file__).parents[2]
FUNCTIONS = [
    name for name in meshwright.__all__ if not name.startswith("__") and not inspect.isclass(getattr(meshwright, name))
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_function_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    function = getattr(meshwright, name)
    (example,) = doctest.DocTestFinder(recurse=False).find(function, name, globs={"__name__": "example"})
    assert example.examples, f"mw.{name} has no example in its docstring"
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert result.failed == 0, "".join(report)
