# make run     install with an OpenCL runtime for the CPU, run one problem, check it against NumPy
# make test    install what the tests need (PyCUDA is built against a stand-in for the driver) and run them
# make quick   install the same, and run in less than a minute those of them that need few kernels
# make check   lint, formatting, types, tests, and on CUDA those that the other backends pass in make test
# make test-torch  install PyTorch as well, and run the tests of dispatcher.torch, which are skipped without it
# make check-large  every problem at a published size on OpenCL, all elements against the reference; goes on where it
#              was broken off; LARGE="--seconds 600" passes options on
# make check-map  a Zarr array of 3 GB through `dispatcher map` in 1 GB of memory, interrupted, killed and resumed;
#              MAP="--megabytes 500" passes options on
# make fuzz    look for wrong results with random operators for ten minutes; FUZZ="--minutes 60 --seed 7" passes options on
# make fuzz-torch  200 random modules of PyTorch, imported and compiled
# make check-isa  results and kernels of OpenCL with Intel's compiler for processors with AVX2; ISA=corei7 for 128-bit vectors
# make exports write every problem in every form: for CUDA compiled and run on the simulator, as in make test, and compiled
#              by nvcc from PyPI; for OpenCL run by a program of its own
# make docs    build the manual, into site/; warnings are errors
# make bench   time every problem against PyTorch, ONNX Runtime and OpenVINO on the CPU, and print the table;
#              BENCH="--full --table" passes options on, see bench/README.md
# make clean   remove what the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The stamps say which extras are installed; they are renewed when pyproject.toml changes.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
TORCH_STAMP := $(VENV)/.installed-torch
BENCH ?=
FUZZ ?=
LARGE ?=
MAP ?=
ISA ?= core-avx2
# Tests run in as many processes as there are cores.
PYTEST ?= -n auto
# What must run, not be skipped: OpenCL and CUDA, which this file installs, and what REQUIRE names besides. Without a
# CUDA driver the tests' simulator stands in for it.
REQUIRE ?=
ON_CUDA := DISPATCHER_CUDA_SIM=1 DISPATCHER_TEST_REQUIRE=cuda
# Three GPUs: without tensor cores for TF32, with little and with much shared memory; sums are cut as real ones cut them. On
# each of them half as many random operators as elsewhere.
THREE := DISPATCHER_CUDA_SIM_DEVICES=3 DISPATCHER_CUDA_SIM_ARCH=7.5,8.0,9.0 DISPATCHER_CUDA_SIM_MMA=rz \
	DISPATCHER_TEST_EXAMPLES=0.5

# A quick start whose blocks need what a run has: the page's name and ]' follow.
PAGE := 'tests/test_docs.py::test_every_block_of_a_page_runs[docs/quickstart

# Without compilers: files, arguments, devices, the reference. With them: three problems on OpenCL and two on CUDA.
QUICK := api arguments expressions filecache groups imports loader numpy_ref problem_files selection signatures
QUICK_OPENCL := test_parity and opencl and sample and float32 and (asym or layernorm_gelu_scaling or softmax)
QUICK_CUDA := on_the_device_at_hand and (asym or max-max)

.PHONY: run test test-torch quick check check-large check-map check-isa fuzz fuzz-torch exports docs bench clean

run: $(RUN_STAMP)
	$(BIN)/dispatcher run conv-transpose3d-max-max-sum --case kernelbench --device opencl --verify

test: $(DEV_STAMP)
	DISPATCHER_TEST_REQUIRE=opencl,$(REQUIRE) $(BIN)/python -m pytest $(PYTEST) --ignore-glob='tests/test_cuda*'
	$(ON_CUDA) $(BIN)/python -m pytest $(PYTEST) tests/test_cudasim.py tests/test_cuda_*.py $(PAGE)/competitions.md]'
	$(ON_CUDA) $(BIN)/python -m pytest $(PYTEST) tests/test_family.py -k 'test_sample and cuda'
	$(ON_CUDA) $(THREE) $(BIN)/python -m pytest $(PYTEST) tests/test_parity.py tests/test_properties.py tests/test_docs.py -k cuda

test-torch: $(TORCH_STAMP)
	DISPATCHER_TEST_REQUIRE=opencl,torch $(BIN)/python -m pytest $(PYTEST) tests/test_torch_*.py $(PAGE)/competitions.md]' $(PAGE)/pytorch.md]'

quick: $(DEV_STAMP)
	DISPATCHER_TEST_EXAMPLES=0.1 $(BIN)/python -m pytest $(PYTEST) $(QUICK:%=tests/test_%.py)
	DISPATCHER_TEST_REQUIRE=opencl $(BIN)/python -m pytest $(PYTEST) tests/test_parity.py -k '$(QUICK_OPENCL)'
	$(ON_CUDA) $(BIN)/python -m pytest $(PYTEST) tests/test_cuda_problems.py -k '$(QUICK_CUDA)'

check: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test
	$(ON_CUDA) $(BIN)/python -m pytest $(PYTEST) tests/test_exactness.py tests/test_reported_cases.py -k cuda:0

check-large: $(DEV_STAMP)
	$(BIN)/python -m tests.large $(LARGE)

check-map: $(DEV_STAMP)
	$(BIN)/python -m tests.large_map $(MAP)

fuzz: $(DEV_STAMP)
	$(ON_CUDA) $(BIN)/python -m tests.fuzz $(FUZZ)

fuzz-torch: $(TORCH_STAMP)
	DISPATCHER_TEST_EXAMPLES=40 $(BIN)/python -m pytest $(PYTEST) tests/test_torch_random.py

check-isa: $(DEV_STAMP)
	CL_CONFIG_CPU_TARGET_ARCH=$(ISA) DISPATCHER_TEST_REQUIRE=opencl $(BIN)/python -m pytest $(PYTEST) \
		tests/test_winograd.py tests/test_opencl_*.py tests/test_parity.py -k 'not numpy and not cuda'

exports: $(DEV_STAMP)
	$(ON_CUDA) DISPATCHER_CUDA_SIM_DEVICES=1 DISPATCHER_TEST_EXPORTS=all $(BIN)/python -m pytest $(PYTEST) tests/test_cuda_export.py tests/test_opencl_export.py

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

bench: $(BENCH_STAMP)
	$(BIN)/python bench/cpu_peers.py $(BENCH)

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[cpu]'
	touch $@

$(DEV_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev]'
	$(BIN)/python -m tests.cudasim.pycuda_wheel --install
	touch $@ $(RUN_STAMP)

$(TORCH_STAMP): $(DEV_STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev,torch]'
	touch $@

$(DOCS_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(BENCH_STAMP): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[cpu,bench]'
	touch $@ $(RUN_STAMP)
