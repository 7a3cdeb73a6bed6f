"""`mw.launch` in a real Jupyter kernel: the example runs, and output and errors of ranks appear in the right cells."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_ranks.ipynb"

FAILING_CELL = """
def fail():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise LookupError("the seventh sample is missing")
    dist.barrier()

mw.launch(fail, device="cpu")
"""
PROGRESS_CELL = r"""
def count():
    import sys, time
    for percent in (50, 100):
        print(f"\r{percent}%", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("done")

mw.launch(count, device="cpu")
"""


def printed(cell: nbformat.NotebookNode, stream: str = "stdout") -> str:
    return "".join(output.text for output in cell.outputs if output.get("name") == stream)


def test_the_example_runs_and_output_and_errors_of_ranks_are_in_the_cells_that_launched_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(EXAMPLE, as_version=4)
    example_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failing = nbformat.v4.new_code_cell(FAILING_CELL, metadata={"tags": ["raises-exception"]})
    progress = nbformat.v4.new_code_cell(PROGRESS_CELL)
    notebook.cells += [failing, progress]
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()

    first, second = (printed(cell) for cell in example_cells if "mw.launch" in cell.source)
    for text in (first, second):
        assert "rank 0 of 2 has joined\n" in text
        assert "[rank 1] rank 1 of 2 has joined\n" in text
        before, after = (float(loss) for loss in re.findall(r"from ([\d.]+) to ([\d.]+) in", text)[0])
        assert after < before / 2
    assert first.count("step ") == 5
    assert second.count("step ") == 10
    assert not any(printed(cell) for cell in example_cells if "mw.launch" not in cell.source)

    (error,) = [output for output in failing.outputs if output.output_type == "error"]
    assert error.ename == "RankError"
    assert error.evalue.startswith("rank 1 of 2 failed: LookupError: the seventh sample is missing")
    assert 'raise LookupError("the seventh sample is missing")' in error.evalue, "the source of the cell is shown"
    assert "in fail" in error.evalue

    assert sorted(printed(progress).splitlines()) == ["[rank 1] done", "done"]
    assert "[rank 1] 100%\n" in printed(progress, "stderr")
    assert "\r100%" in printed(progress, "stderr")
