# Everything sets itself up: `make demo` on a fresh clone is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(wildcard plugins/*.cpp plugins/kernels/*)

.PHONY: setup demo serve test test-long lint format bench clean

setup: $(READY)

# tritonserver's wheel names numpy<2 and old clients as requirements that we meet or don't need: --no-deps.
$(READY): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt scikit-build-core nanobind cmake ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[serving,test,lint]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps nvidia-pytriton
	touch $@

demo: setup
	$(BIN)/python -m loadtest.demo

serve: setup
	$(BIN)/trt-backend serve --model glm53-tiny

test: setup
	$(BIN)/python -m pytest -m "not long"

test-long: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	for name in resolver decode tick reclaim backup residency streaming; do $(BIN)/python -m loadtest bench $$name || exit 1; done

clean:
	rm -rf $(VENV) build .server
