# Everything a fresh machine needs lies behind these targets: Python >= 3.11, make and g++ are enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test check soak clean

setup: .venv/ready

# torch first and by its pinned version: whatever is installed after it finds it there.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[vision,zoo,quantize,dev]"
	touch $@

demo: setup
	$(BIN)/meshwright train jobs/mnist.yaml

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two at a time, a file at a time: what a file has traced or started once serves all its tests.
test: check
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder

soak: setup
	$(BIN)/python -m pytest -m soak -n 2 --dist loadfile --no-loadscope-reorder

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
