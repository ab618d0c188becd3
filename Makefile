# The set-up, the tests and the fork, by name. Everything that is made here lies in .venv, or in the cache that
# scripts/build/fork.py describes; re-running a target does only what has changed.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
FORK    = $(PYTHON) scripts/build/fork.py

# `make run PROMPT="..." ARGS="--memory 200M"`
PROMPT ?=
ARGS   ?=
CLANGXX ?= clang++
# `make test TESTS=tests/build/test_fork.py`
TESTS  ?=

.DEFAULT_GOAL := help
.PHONY: help env test-env run test test-archs nightly lint lint-native types results papers faults repin docs wheels archs server-conformance patches-check patches-refresh native-stress-tsan native-stress-asan clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' Makefile

$(VENV)/pip-ready:
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	@touch $@

# fork.py answers from its cache in well under a second, so it is asked every time; the stamps hold what is installed.
# The wheel goes in by its path, and first: pip then finds llama-cpp-python satisfied and never looks for the release.
# $(1): the command that makes the wheel; $(2): the stamp; $(3): the extras
define install
	@set -e; wheel="$$($(1) | tail -n 1)"; test -f "$$wheel"; \
	if [ "$$wheel" != "$$(cat $(VENV)/fork-wheel 2>/dev/null)" ]; then \
		rm -f $(VENV)/fork-wheel; \
		echo "installing $$(basename "$$wheel")" >&2; \
		$(PY) -m pip install --quiet --force-reinstall --no-deps "$$wheel"; \
		echo "$$wheel" > $(VENV)/fork-wheel; \
	fi; \
	if ! cmp -s pyproject.toml $(VENV)/$(2); then \
		echo "installing moeoff and its requirements" >&2; \
		$(PY) -m pip install --quiet "$$wheel" -e '.$(3)'; \
		cp pyproject.toml $(VENV)/$(2); \
	fi
endef

env: $(VENV)/pip-ready ## .venv with the fork, its web page, and moeoff (editable): what it takes to run and to serve
	$(call install,$(FORK) build,env-installed,)

test-env: env
	$(call install,$(FORK) build,test-installed,[test])

run: $(VENV)/pip-ready ## moeoff run on the demo model; PROMPT="...", ARGS="..."; runs no npm and installs nothing for tests
	$(call install,$(FORK) build --no-npm,env-installed,)
	@exec $(VENV)/bin/moeoff run $(ARGS) $${PROMPT:+-p "$$PROMPT"}
run: export PROMPT := $(PROMPT)

test: test-env ## the quick tests, a file's in one of four processes: on two cores another computes while one waits for a disk or a server
	$(PY) -m pytest -n 4 --dist loadfile -m "not slow and not perf and not cgroup and not archs" $(TESTS)

test-archs: test-env ## every architecture of llama.cpp gives stock's bits; builds the program that writes their models
	$(PY) -m pytest -m "archs and not slow"

nightly: test-env patches-check lint ## every test, llama-server's too, every fault, and both sanitizers: hours; the cgroup tests need root, perf wants an idle machine
	$(call install,$(FORK) build,nightly-installed,[test,nightly])
	$(PY) -m pytest -m "not perf" --cov
	$(PY) -m pytest -m perf
	$(MAKE) server-conformance
	$(PY) scripts/bench/soak.py -m moeoff/data/demo-moe-q8_0.gguf --minutes 120 --memory 160M --clients 4 --think 1
	$(MAKE) faults
	$(MAKE) native-stress-tsan native-stress-asan

faults: test-env ## the n-th fault, damaged files, interrupts, kills, disk trouble, hostile clients, advisories: the figures of docs/results/reliability.md
	$(PY) scripts/faults/faults.py nth --json docs/results/data/nth-fault.json
	$(PY) scripts/faults/faults.py files --seed 1 --seed 2 --json docs/results/data/beside.json
	$(PY) scripts/faults/faults.py files --only model --count 30000 --seed 3 --json docs/results/data/headers.json
	$(PY) scripts/faults/faults.py objects --seed 1 --seed 2 --json docs/results/data/objects.json
	$(PY) scripts/faults/faults.py kill --json docs/results/data/kill.json
	$(PY) scripts/faults/faults.py disk --json docs/results/data/disk.json
	$(PY) scripts/faults/faults.py http --rounds 5 --json docs/results/data/hostile-http.json
	$(PY) scripts/faults/faults.py advisories --json docs/results/data/advisories.json
	@$(MAKE) --no-print-directory results

repin: test-env ## to another release of llama-cpp-python: VERSION=... SHA256=... (of its sdist); ends with all tests
	@test -n "$(VERSION)" -a -n "$(SHA256)" || { echo "say which: make repin VERSION=... SHA256=..." >&2; exit 2; }
	@$(FORK) repin "$(VERSION)" "$(SHA256)"

lint: test-env ## style, as pyproject.toml has it
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	@$(MAKE) --no-print-directory lint-native

lint-native: ## clang's thread safety analysis of the native store
	@if command -v $(CLANGXX) > /dev/null; then \
		$(CLANGXX) -std=c++17 -fsyntax-only -Wall -Wextra -Wthread-safety -Wthread-safety-beta -Werror llamacpp_patches/src/core/*.cpp && echo "the native store keeps to its locks"; \
	else \
		echo "$(CLANGXX) is not installed: which lock guards what in the native store is not checked" >&2; \
	fi

types: test-env ## mypy on moeoff/, as pyproject.toml has it
	$(VENV)/bin/mypy

docs: env ## the site, in build/docs, where a warning is an error, and man pages, in build/man
	$(call install,$(FORK) build,docs-installed,[docs])
	$(PY) scripts/build/docs.py cli --check
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict --config-file .mkdocs.yml
	$(PY) scripts/build/docs.py man build/man

wheels: docs ## wheels for other machines, in dist: a CPU backend for each level, man pages
	$(PY) scripts/build/wheels.py

results: ## the tables and charts of the pages, from docs/results/data
	@$(PYTHON) scripts/results.py

papers: env ## the papers' claims and ours, in full: docs/results/papers.md
	$(PY) scripts/papers/papers.py --json docs/results/data/papers.json
	$(PY) scripts/results.py

archs: ## llama.cpp's test-llama-archs, which writes a small model for each architecture; prints its path
	@$(FORK) archs

server-conformance: env ## llama-server's own tests: what it passes, moeoff's server passes too; builds llama-server
	@$(PY) scripts/build/server_conformance.py

patches-check: ## do the patches apply cleanly, and once only, to the pinned release?
	@$(FORK) check

patches-refresh: ## patch files anew from the commits in DIR (made by: scripts/build/fork.py tree DIR)
	@test -n "$(DIR)" || { echo "say where: make patches-refresh DIR=..." >&2; exit 2; }
	@$(FORK) refresh "$(DIR)"

native-stress-tsan: ## the native store under the thread sanitizer
	bash scripts/build/native_stress.sh thread 60

native-stress-asan: test-env ## the native store, the row kernels, and ops on fewer threads than planned under the address sanitizer
	bash scripts/build/native_stress.sh address 60
	SANITIZE=1 PYTHON=$(PYTHON) bash scripts/build/fuzz_row_kernels.sh 20000
	bash scripts/build/fewer_threads.sh $(PY)

clean: ## removes .venv and what the tests leave; the cache of builds stays
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache .coverage*
	find moeoff scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
