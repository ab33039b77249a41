# Two commands matter: `make demo` and `make test`. Both start with `make setup`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup native demo test test-slow test-kernels test-sweep soak lint types unit docs test-oldest test-integrations walk clean

setup: $(STAMP)

# uv installs the several gigabytes of PyTorch in a fraction of pip's time; byte-compiling once keeps every
# later import of torch fast.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("kronattn needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

# Operators for CPUs in a package of their own, where there is a compiler; without them their tests are skipped.
NATIVE := $(VENV)/.native

native: $(NATIVE)

$(NATIVE): $(STAMP) $(wildcard native/*.* native/csrc/* native/kronattn_cpu/*.py)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-build-isolation --no-deps --reinstall-package kronattn-cpu ./native
	@touch $@

demo: setup
	$(BIN)/kronattn report --output out/report.html

test: lint types docs unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup $(if $(shell command -v c++),$(NATIVE))
	$(BIN)/python -m pytest -n 2 --dist worksteal

# What make test leaves out: whole sweeps of which it runs a part, and random cases by the thousand.
test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=large tests/ops/test_backends.py tests/distributions tests/training/test_segmentation.py

# Every kernel, compiled for an H100 or H200 by the Triton that is installed; no GPU is needed.
test-kernels: setup
	$(BIN)/python -m pytest -m slow tests/ops/test_compiles_for_sm90.py

# Every fused network at twenty sizes, before and after training: minutes.
test-sweep: setup
	$(BIN)/python -m pytest -m sweep tests/inference

# Warnings are errors: a link to a page that is not there, a name that the API does not have.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The lower bounds of pyproject.toml, in an environment of their own.
test-oldest: setup
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .venv-oldest
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python --compile-bytecode --resolution lowest-direct --editable '.[all,dev]'
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal

# Other packages with our networks and layers in them: frameworks (MONAI, smp, ultralytics, an nnU-Net) and tools, in an
# environment of their own. OpenCV without windows, since its other build does not import on a machine without libGL.
# thop is ultralytics' own, which comes with it: the original has the same files.
INTEGRATIONS := dynamic-network-architectures opencv-python-headless peft torchao torchinfo

test-integrations: setup
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) .venv-integrations
	printf 'opencv-python; python_version < "3"\n' > .venv-integrations/overrides.txt
	$(BIN)/uv pip install --quiet --python .venv-integrations/bin/python --compile-bytecode --constraint constraints.txt --override .venv-integrations/overrides.txt --editable '.[all,dev,ultralytics]' $(INTEGRATIONS)
	.venv-integrations/bin/python -m pytest tests/integrations

# Random cases for as long as you like: make soak MINUTES=60 SEED=1. What it tried and found goes to results/soak.json.
MINUTES ?= 10
SEED    ?= 0

soak: setup
	$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED)

# Every command and snippet of the README and the guide, as a newcomer types them, in an empty folder: minutes.
walk: setup
	$(BIN)/python -m pytest -m walk tests/test_walk.py

clean:
	rm -rf $(VENV) native/build native/*.egg-info .venv-oldest .venv-integrations out site .pytest_cache .mypy_cache .ruff_cache .hypothesis
