# Two commands matter: `make demo` and `make test`. Both start with `make setup`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo test lint types unit clean

setup: $(STAMP)

# uv installs the several gigabytes of PyTorch in a fraction of pip's time; byte-compiling once keeps every
# later import of torch fast.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("kronattn needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

demo: setup
	$(BIN)/kronattn report --output out/report.html

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
