# Everything a fresh machine needs lies behind these targets: Python >= 3.11, make and g++ are enough.
PYTHON ?= python3
# `make test TORCH=2.15.0` tests with another torch, in an environment of its own: with the torchvision and torchao that
# fit it, and without mypy, because the types of torch differ from version to version.
TORCH ?= 2.13.0
VENV := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-torch-$(TORCH))
BIN := $(VENV)/bin
PEERS := accelerate==1.15.0 lightning==2.6.6 deepspeed==0.19.8
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Tests start many processes, which would otherwise compile the package again each time.
unexport PYTHONDONTWRITEBYTECODE

# In CI, where everything was installed that can be, a test that is skipped for another reason than the machine's fails.
ifdef CI_SKIPS
PYTEST += --no-other-skips
endif

# What the core leaves out, each group by itself (tests/selection/groups.py).
GROUPS := plans proofs launch compat docs validation

.PHONY: setup demo test $(GROUPS:%=test-%) check soak sanitize docs reference validate peers ray megatron clean

setup: $(VENV)/ready

# torch first and by its pinned version: whatever is installed after it finds it there.
$(VENV)/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q torch==$(TORCH)
	if [ $(TORCH) = 2.13.0 ]; then cp constraints.txt $(VENV)/constraints.txt; \
	else { echo torch==$(TORCH); grep -v '^torch' constraints.txt; } > $(VENV)/constraints.txt; fi
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e ".[pages,vision,zoo,quantize,dev]"
	touch $@

demo: setup
	$(BIN)/meshwright train mnist

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(filter 2.13.0,$(TORCH)),$(BIN)/mypy --num-workers 2)

# Two at a time, a file at a time: what a file has traced or started once serves all its tests. Tests start ranks, so two
# at a time keep two cores busy for 95% of the time: what makes them faster is less work. The core has the cheapest cases
# of each test; `make test test-plans test-proofs test-launch` runs all of them that take no hours.
test: check
	$(PYTEST) -m "not soak" --group=core --durations 10

$(GROUPS:%=test-%): test-%: setup
	$(PYTEST) -m "not soak" --group=$* --durations 5

# The long tests take hours. They are cut into parts of at most ten minutes on two cores (tests/selection/parts.py), and
# the summary says how many there are. CI runs the part of the number of commits. `make soak PART=all` runs all of them.
PART ?= 0
soak: setup
	$(PYTEST) -m soak --durations 10 $(if $(filter all,$(PART)),,--part $(PART))

# The C code under gcc's sanitizers: a million exchanges, in about half an hour on two cores. They are part of the soak.
sanitize: setup
	$(PYTEST) -m soak --durations 5 tests/sanitizers

# The site of the documentation. Dead links and anchors are errors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Writes the generated parts of docs/ again: the reference, the drawings and the table of the sweep.
reference: setup
	$(BIN)/python -m documentation

# Predicts published training runs, prints a table and writes validation/report.md; ALL=1 predicts every row and writes
# validation/report_all.md.
validate: setup
	$(BIN)/python -m validation $(if $(ALL),--all)

# The libraries that `python -m validation.bench peers` compares with, in an environment of their own. torch comes first and pinned
# here, too. DeepSpeed looks at the installed torch while it is built, and compiles its kernels when they are first used.
peers: .venv-peers/ready

.venv-peers/ready: Makefile pyproject.toml constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -q torch==2.13.0
	.venv-peers/bin/python -m pip install -q -c constraints.txt "setuptools>=68" wheel -e .
	DS_BUILD_OPS=0 .venv-peers/bin/python -m pip install -q --no-build-isolation -c constraints.txt $(PEERS)
	touch $@

# Ray Train for the tests in tests/compat/ray, in an environment of its own.
ray: .venv-ray/ready

.venv-ray/ready: Makefile pyproject.toml constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -q torch==2.13.0
	.venv-ray/bin/python -m pip install -q -c constraints.txt "setuptools>=68" wheel -e .
	.venv-ray/bin/python -m pip install -q -c constraints.txt "ray[client,train]==2.60.0"
	touch $@

# Megatron core for the tests in tests/audit, in an environment of its own.
megatron: .venv-megatron/ready

.venv-megatron/ready: Makefile
	test -x .venv-megatron/bin/python || $(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip install -q torch==2.13.0 numpy packaging
	.venv-megatron/bin/python -m pip install -q --no-deps megatron-core==0.16.1
	touch $@

clean:
	rm -rf .venv .venv-torch-* .venv-peers .venv-ray .venv-megatron site .mypy_cache .ruff_cache .pytest_cache .hypothesis
