# make demo: set up, then compile the tiny GLM-5.2 and let it write.
# make test: set up, then everything that continuous integration runs.
# make plot-indexer: measure the indexer over context lengths on this machine's GPU and plot it.
# make plot-slice: measure a decode step of six layers on this machine's GPU and plot it.
# make plot-linears: measure the bf16 linears on this machine's GPU and plot them.
.DEFAULT_GOAL := help
.PHONY: help demo test plot-indexer plot-slice plot-linears venv-demo venv-test lint types test-cpu test-interpreter test-oldest test-wheel test-others clean

PY := .venv/bin/python
WORKERS ?= 2
OLDEST_TRANSFORMERS := 5.20.0
OLDEST = .venv/transformers-$(OLDEST_TRANSFORMERS)
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1

help:
	@sed -n 's/^# //p' Makefile

venv-demo:
	@tools/make_venv.sh

venv-test:
	@tools/make_venv.sh test

demo: venv-demo
	$(PY) examples/demo.py

test: venv-test lint
	@$(MAKE) --no-print-directory -j2 types test-others
	@$(MAKE) --no-print-directory test-cpu test-interpreter test-oldest

# What runs on one core: beside the types.
test-others: test-wheel
	$(PY) examples/demo.py

lint: venv-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: venv-test
	$(PY) -m mypy glm_compile
	$(PY) -m mypy --explicit-package-bases fx_passes
	$(PY) -m mypy --explicit-package-bases ops

# References, passes, backend, cache, generation, and every kernel compiled for sm_90a and sm_100a.
# A GPU is hidden from these and the next two: they are the same everywhere, benchmarks small.
test-cpu: venv-test
	CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not gpu and not big_memory"

# The logic of the Triton kernels, on the CPU, in a process of its own: the variable acts at import.
test-interpreter: venv-test
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) -m interpreter

# What depends on transformers against the oldest supported one: its caches, configs and generation,
# the graphs of its model, and that all passes match them and leave the numbers.
test-oldest: venv-test
	@test -e $(OLDEST)/.complete || { rm -rf $(OLDEST) && $(PY) -m pip install --no-deps \
		--target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS) && touch $(OLDEST)/.complete; }
	CUDA_VISIBLE_DEVICES= PYTHONPATH=$(OLDEST) OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal \
		-m "not (gpu or big_memory or slow or compile_only or newest_transformers)" \
		tests/fx_passes tests/glm_compile tests/regressions

# A wheel holds the three packages and imports without the repository.
test-wheel: venv-test
	tools/check_wheel.sh $(PY)

plot-indexer: venv-test
	$(PY) -m pytest tests/benchmarks/test_indexer_benchmark.py --benchmark-enable \
		--benchmark-json indexer.json
	$(PY) -m tests.benchmarks.plot_indexer indexer.json examples/indexer_latency.png

plot-slice: venv-test
	$(PY) -m pytest tests/benchmarks/test_slice_benchmark.py --benchmark-enable \
		--benchmark-json slice.json
	$(PY) -m tests.benchmarks.plot_slice slice.json examples/slice_step.png

plot-linears: venv-test
	$(PY) -m glm_compile.ops.bf16_linear.tune --keep --json linears.json
	$(PY) -m tests.benchmarks.plot_bf16_linear linears.json examples/bf16_linear_speedup.png

clean:
	rm -rf .venv build dist ./*.egg-info
