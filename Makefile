# Each target sets up what it needs: a virtual environment with the versions of constraints.txt.
#
#   make demo        causal documents, end to end, on a CPU
#   make test        the default suite
#   make test-slow   the long tests
#   make test-gpu    the tests that need a GPU
#   make test-triton TRITON=3.6.0    the tests of generated kernels under another Triton
#   make lint        format, lint and types
#   make format      let ruff rewrite the files
#   make clean       remove everything that was built
#
# `make test-gpu PY=python3` takes an interpreter as it is, with flashgen installed, and sets up
# nothing: for a machine that has its own torch.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
TRITON ?= 3.6.0

ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

PYTEST = $(PY) -m pytest -n $(WORKERS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Three processes, because one that interprets Triton kernels can't compile any. All three run,
# and one that fails fails the target. $(2) is an exit code that passes: pytest's 5 is "no tests".
define run_suite
	@status=0; \
	env -u TRITON_INTERPRET $(1) tests || [ $$? -eq $(2) ] || status=1; \
	env TRITON_INTERPRET=1 $(1) tests/interpret || [ $$? -eq $(2) ] || status=1; \
	env -u TRITON_INTERPRET $(1) tests/aot || [ $$? -eq $(2) ] || status=1; \
	exit $$status
endef

# An environment whose interpreter has gone is made anew; any other is brought up to date.
define make_venv
	$(1)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(1)
endef

# $(2) is a file of constraints, $(3) what is installed beside flashgen.
define install
	$(1)/bin/python -m pip install -q -c $(2) setuptools wheel
	$(1)/bin/python -m pip install -q -c $(2) --no-build-isolation -e '.[cpu,dev]' $(3)
endef

.PHONY: setup demo test test-slow test-gpu test-triton lint format clean

setup: $(READY)

$(VENV)/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(VENV))
	$(call install,$(VENV),constraints.txt)
	@touch $@

demo: $(READY)
	$(PY) examples/causal_documents.py

test: $(READY)
	$(call run_suite,$(PYTEST),0)

test-slow: $(READY)
	$(call run_suite,$(PYTEST) -m "slow and not gpu",5)

# One process: the tests share a GPU. What is slow compiles most of the time, and wants several:
# pytest -n 15 -m "gpu and slow" tests/gpu
test-gpu: $(READY)
	@$(PY) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("torch sees no GPU here")'
	env -u TRITON_INTERPRET $(PY) -m pytest -m "gpu and not slow" tests

test-triton: $(VENV)-triton-$(TRITON)/.ready
	env TRITON_INTERPRET=1 $(VENV)-triton-$(TRITON)/bin/python -m pytest tests/interpret
	env -u TRITON_INTERPRET $(VENV)-triton-$(TRITON)/bin/python -m pytest tests/aot

# The interpreter of Triton 3.6 needs numpy < 2.4. CUDA builds of torch insist on their own Triton.
$(VENV)-triton-%/.ready: pyproject.toml constraints.txt
	$(call make_venv,$(@D))
	grep -Ev '^(triton|numpy)==' constraints.txt > $(@D)/constraints.txt
	$(call install,$(@D),$(@D)/constraints.txt,'triton==$*' 'numpy<2.4')
	@touch $@

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(VENV)-triton-* build dist flashgen.egg-info .hypothesis .mypy_cache \
		.pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
