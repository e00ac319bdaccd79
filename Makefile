# Every command of the project lives here once; README, .ci/run and the workflow call these targets.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE # without bytecode TensorFlow takes three times as long to import
CONFIG ?= quickstart
STAMP := $(VENV)/.installed-$(shell cat requirements/dev.txt requirements/bootstrap.txt pyproject.toml 2>/dev/null | cksum | cut -d' ' -f1)

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMP) ## Make the virtual environment (all other targets do it for you)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 is needed: install it, or say PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Installing Python packages into $(VENV), once; about two minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/bootstrap.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@$(BIN)/fedemb plan --config quickstart >/dev/null # writes bytecode: without it each plan takes twice as long
	@rm -f $(VENV)/.installed-*
	@touch $@

run: setup ## Run the pipeline; DATA=file CONFIG=file POLICY=folder ARGS="--set a.b=c"
	$(BIN)/fedemb run --config $(CONFIG) $(if $(DATA),--data $(DATA)) $(if $(POLICY),--policy $(POLICY)) $(ARGS)

FEDEMB_DATA ?= ../shared/data
RESULTS := runs/results-$(shell date +%Y%m%d-%H%M%S)
results: setup ## Run the three presets of docs/explanation/results.md and list them; FEDEMB_DATA=folder
	$(BIN)/fedemb run --runs $(RESULTS) --run-id quickstart
	for name in omniglot_identities omniglot_writers; do $(BIN)/fedemb run --runs $(RESULTS) --run-id $$name \
	  --config $$name --data $(FEDEMB_DATA)/omniglot_background.parquet --policy $(RESULTS)/policy-$$name; done
	$(BIN)/fedemb runs --runs $(RESULTS)

check: setup ## Format, lint, types, layers, plain English
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.docs.plain_english

SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder # three on two cores: tests wait, too
test: setup ## Format, lint, types, layers, tests; CI runs this and test-long
	@$(MAKE) --no-print-directory --jobs=2 check test-quick

test-quick: setup # What `make test` runs beside `make check`
	$(BIN)/python -m pytest -m "not slow and not long and not planted_bug" $(SIDE_BY_SIDE)

test-long: setup ## The planted-bug suite, and tests that take more than a second of a processor
	$(BIN)/python -m pytest -m "(long or planted_bug) and not slow and not mutation" \
	  $(SIDE_BY_SIDE) $$(grep -rlE --include='test_*.py' 'mark\.(long|planted_bug)' tests)

test-full: check planted-bugs ## The long tests too
	$(BIN)/python -m pytest

attacks: setup ## Carry out 500 attacks drawn at random; SEED=number repeats a night
	$(BIN)/python -m tests.adversary.random_attacks --attacks $(or $(ATTACKS),500) $(if $(SEED),--seed $(SEED))

bench: setup ## Time private rounds against plain steps: W1, W2, and W3 of DP-SGD; BENCH_TINY=1 tries it
	$(BIN)/python -m tests.benchmarks.bench_rounds

bench-peers: setup ## Time W1 and W3 of other libraries too; installs 7 GB
	for lock in tf torch; do test -x .venv-peers-$$lock/bin/python || { \
	  $(BIN)/uv venv --quiet --python $(PYTHON) .venv-peers-$$lock; $(BIN)/uv pip install --quiet --no-deps \
	  --require-hashes --python .venv-peers-$$lock/bin/python -r tests/benchmarks/locks/$$lock.txt; }; done
	$(BIN)/python -m tests.benchmarks.bench_rounds --works W1,W3 --cores 2 \
	  --peers tff,pfl,opacus,tf_privacy,jax_privacy

golden: setup ## Rewrite golden files; review the diff
	-$(BIN)/python -m pytest -q -k "golden" --force-regen tests/pipelines
	git diff --stat tests/golden

COMPILE := ../$(BIN)/uv pip compile --quiet --python-version 3.11 --generate-hashes --no-emit-index-url --no-header
lock: setup ## Compile requirements/*.in to hashed locks
	cd requirements && for name in cpu dev light gpu tpu; do $(COMPILE) --override overrides.txt $$name.in -o $$name.txt; done
	cd requirements && for name in audit bootstrap build docs mutation; do $(COMPILE) $$name.in -o $$name.txt; done
	cd tests/benchmarks/locks && for name in tf torch; do \
	  ../../$(COMPILE) --override overrides_$$name.txt $$name.in -o $$name.txt; done

DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed-$(shell cat requirements/docs.txt 2>/dev/null | cksum | cut -d' ' -f1)
docs: $(DOCS_STAMP) ## Build the site of docs/ into build/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet
	@echo "open build/site/index.html"

readme: setup ## Make the picture of README from a run of the quickstart, in Chromium
	$(BIN)/python -m tests.docs.picture

docs-reference: setup ## Rewrite the generated pages of docs/reference/
	$(BIN)/python -m tests.docs.generate

$(DOCS_STAMP): | setup
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(BIN)/uv pip install --quiet --python $(DOCS_VENV)/bin/python --no-deps --require-hashes -r requirements/docs.txt
	@rm -f $(DOCS_VENV)/.installed-*
	@touch $@

AUDIT_VENV := .venv-audit
AUDIT_STAMP := $(AUDIT_VENV)/.installed-$(shell cat requirements/audit.txt 2>/dev/null | cksum | cut -d' ' -f1)
audit: $(AUDIT_STAMP) ## Ask for known vulnerabilities of every locked package; what was looked into stands in SECURITY.md
	for lock in requirements/*.txt; do case $$lock in *overrides*) continue;; esac; \
	  echo "$$lock"; $(AUDIT_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off \
	  $$(sed -n 's/^| `\([A-Z]*-[0-9A-Za-z-]*\)` .*/--ignore-vuln \1/p' SECURITY.md) -r $$lock; done

$(AUDIT_STAMP): | setup
	test -x $(AUDIT_VENV)/bin/python || $(PYTHON) -m venv $(AUDIT_VENV)
	$(BIN)/uv pip install --quiet --python $(AUDIT_VENV)/bin/python --no-deps --require-hashes -r requirements/audit.txt
	@rm -f $(AUDIT_VENV)/.installed-*
	@touch $@

MUTATION_VENV := .venv-mutation
MUTATION_STAMP := $(MUTATION_VENV)/.installed-$(shell cat requirements/mutation.txt 2>/dev/null | cksum | cut -d' ' -f1)
mutation: $(MUTATION_STAMP) ## Try changes that Cosmic Ray makes to the privacy core; MINUTES=60, resumes
	mkdir -p build
	$(MUTATION_VENV)/bin/python tests/mutation/mutants.py $$($(BIN)/python -m tests.mutation.run --files) > build/mutants.jsonl
	$(BIN)/python -m tests.mutation.run build/mutants.jsonl --minutes $(or $(MINUTES),60)

$(MUTATION_STAMP): | setup
	test -x $(MUTATION_VENV)/bin/python || $(PYTHON) -m venv $(MUTATION_VENV)
	$(BIN)/uv pip install --quiet --python $(MUTATION_VENV)/bin/python --no-deps --require-hashes -r requirements/mutation.txt
	@rm -f $(MUTATION_VENV)/.installed-*
	@touch $@

planted-bugs: setup ## Plant each known bug and demand that a test fails; builds of wheel and images run it
	$(BIN)/python -m pytest -q -n 2 --dist load -m "planted_bug and not slow"

wheel: planted-bugs ## Build the wheel, after the planted-bug suite
	$(BIN)/uv build --wheel --no-build-isolation --python $(BIN)/python --out-dir dist

study: setup ## Compare methods at equal noise on Omniglot; BUDGET=hours, resumes
	$(BIN)/python -m studies.utility --data $(FEDEMB_DATA)/omniglot_background.parquet $(if $(BUDGET),--budget $(BUDGET))

images: planted-bugs ## Build the light and cpu images, after the planted-bug suite, with podman or docker
	images/build.sh light cpu

FLAVOURS ?= light cpu
push-images: planted-bugs ## Build and push images with docker, after the planted-bug suite; REGISTRY=address
	REGISTRY=$(REGISTRY) docker buildx bake -f images/docker-bake.hcl --push $(FLAVOURS)

test-containers: setup ## Install podman if needed, build the images and check them
	tests/integration/containers.sh

test-cluster: setup ## Build a Kubernetes control plane from source, once, and hold infra/ against it
	tests/cluster/run.sh

test-registry: setup ## Build Kubeflow's Model Registry from source, once, and register a release there
	tests/registry/run.sh

test-flink: setup ## Partition on Flink, Spark and Prism, where they can be had
	tests/integration/flink.sh

clean: ## Remove the environment and all caches (never runs/)
	rm -rf $(VENV) $(DOCS_VENV) $(AUDIT_VENV) $(MUTATION_VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist

.PHONY: help audit mutation docs docs-reference readme setup wheel run results study check test test-long test-full test-containers test-cluster test-registry test-flink bench attacks golden planted-bugs lock images push-images clean
