# Two commands on a fresh machine with Python 3.12 or newer: `make demo` and `make test`. Everything lands in .venv.
.DEFAULT_GOAL := help
.PHONY: help demo test lint types clean

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

help:
	@echo "make demo    install into $(VENV), then train a small model with FP8 on-policy GRPO on this CPU"
	@echo "make test    install into $(VENV), then ruff, mypy and the tests"
	@echo "make lint    ruff and mypy alone"
	@echo "make clean   remove $(VENV), builds and caches (runs/ stays)"
	@echo "Python 3.12 or newer is looked for as python3.12, then python3; PYTHON=/path/to/python names another."

demo: $(VENV)/.plots
	$(VENV)/bin/jetrl train --config configs/demo.py

test: lint
	$(PY) -m pytest

lint: types
	$(PY) -m ruff check .

# mypy sees neither through an editable install's finder nor that models/ is jetrl_jax.models: it checks the tree that an
# ordinary install lays out.
types: $(VENV)/.test
	@rm -rf build/types && mkdir -p build
	@$(PY) -c "import setuptools; setuptools.setup()" build_py --build-lib build/types >build/types.log 2>&1 || { cat build/types.log >&2; exit 1; }
	cd build/types && ../../$(PY) -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p jetrl_jax

# An existing environment of a new enough Python is kept; otherwise the first Python that will do makes one.
$(VENV)/.made:
	@new='import sys, venv; sys.exit(sys.version_info < (3, 12))'; \
	if $(PY) -c "$$new" 2>/dev/null && $(PY) -m pip --version >/dev/null 2>&1; then touch $@; exit 0; fi; \
	for python in $(PYTHON) python3.12 python3; do \
	  if $$python -c "$$new" 2>/dev/null; then \
	    echo "making $(VENV) with $$python"; \
	    $$python -m venv --clear $(VENV) && touch $@ && exit 0; rm -rf $(VENV); exit 1; \
	  fi; \
	done; \
	echo "jetrl needs Python 3.12 or newer, and none of '$(strip $(PYTHON) python3.12 python3)' is one: install it, or name yours: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1

# One stamp for each set of extras: a second call installs nothing, and a changed pyproject.toml or constraints.txt installs anew.
$(VENV)/.plots: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing jetrl[plots] into $(VENV) (a few minutes the first time)"
	@$(PIP) -e '.[plots]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing jetrl[test,plots,kernels] into $(VENV) (a few minutes the first time)"
	@$(PIP) -e '.[test,plots,kernels]'
	@touch $(VENV)/.plots $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
