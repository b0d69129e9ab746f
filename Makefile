# make install   .venv with everything, native libraries built; does nothing when nothing changed
# make native    rebuild the native libraries after an edit in csrc/ (only what changed is compiled)
# make demo      pre-trains a small DMJD model on the CPU, scores it and writes runs/demo/report.html; RUN=FOLDER names another
# make test      CTest, then pytest, then the tests of the CPU kernels once more without them; WORKERS pytest processes
# make test-slurm  jobs on a real Slurm of four nodes that is started here; as root, with slurm-wlm, munge and iproute2
# make evidence-smoke  two tiny studies of benchmarks/evidence, from training to page
# make lint      ruff and mypy
# make clean     removes what was built; keeps .venv

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/demo
MAX_JOBS ?= 2
# Twice the cores of CI: many tests wait for other processes.
WORKERS ?= 4
# Where a compiler is at hand, a kernel that does not build is an error and not a fallback.
DMJD_EXT ?= $(if $(shell command -v c++),force,auto)
DMJD_CUDA ?= $(if $(shell command -v nvcc),force,auto)
DMJD_JPEG ?= auto
export MAX_JOBS

BIN := $(VENV)/bin
# Twice quiet: errors alone.
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
TORCH := $(VENV)/.torch
INSTALLED := $(VENV)/.installed
NATIVE := build/.native
CMAKE_BUILD := build/cmake
SOURCES := $(shell find csrc -type f)
XDIST := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SELECTED := not gpu and not slurm and not long
# Of tests/ops those that come out otherwise without the native kernels of the CPU.
REFERENCES := $(addprefix tests/ops/test_,$(addsuffix .py,arguments hog hog_flavours masked_depthwise_conv2d masks \
    masks_beit philox tokens transforms))
ALONE := $(shell grep -rl 'mark[.]alone' tests --include='test_*.py')
# $(call timed,NAME,COMMAND) runs it and prints how long it took.
timed = @began=$$(date +%s); $(2) || exit 1; echo "$(1) took $$(($$(date +%s) - began)) s"

.PHONY: install native demo test ctest test-slurm evidence-smoke lint clean

# Libraries are downloaded while the native libraries are compiled: both need torch only.
install:
	@$(MAKE) --no-print-directory -j2 $(INSTALLED) $(NATIVE)

native: $(NATIVE)

# torch first and by itself: the native build below needs it, and pip must not fetch another into an isolated build.
$(TORCH):
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install torch torchvision 'setuptools>=77' ninja
	@touch $@

$(INSTALLED): $(TORCH) pyproject.toml setup.py
	@DMJD_EXT=off DMJD_CUDA=off DMJD_JPEG=off DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --no-build-isolation --editable '.[train,eval,scale,clip,explore,dense,dev]'
	@touch $@

# The compiler's command lines are kept in a log, which is shown when something fails.
$(NATIVE): $(TORCH) setup.py $(SOURCES)
	@echo "building the native libraries"
	@mkdir -p build
	@DMJD_EXT=$(DMJD_EXT) DMJD_CUDA=$(DMJD_CUDA) DMJD_JPEG=$(DMJD_JPEG) $(BIN)/python setup.py build_ext --inplace > build/native.log 2>&1 \
	    || { cat build/native.log; exit 1; }
	@sed -n '/^dmjd: /p' build/native.log
	@touch $@

demo: install
	@$(BIN)/dmjd demo run=$(RUN)

test: install
	$(call timed,CTest,$(MAKE) --no-print-directory ctest)
	$(call timed,pytest with $(WORKERS) workers,$(BIN)/python -m pytest $(XDIST) --durations=20 -m "$(SELECTED) and not alone")
	$(call timed,pytest of tests marked alone,$(BIN)/python -m pytest --durations=5 -m "$(SELECTED) and alone" $(ALONE))
	$(call timed,pytest without native kernels,DMJD_DISABLE_EXT=1 $(BIN)/python -m pytest $(XDIST) $(REFERENCES))

ctest: install
	@cmake -S . -B $(CMAKE_BUILD) -DPython3_EXECUTABLE=$(abspath $(BIN)/python) > build/cmake.log 2>&1 \
	    && cmake --build $(CMAKE_BUILD) --target tests --parallel $(MAX_JOBS) >> build/cmake.log 2>&1 \
	    || { cat build/cmake.log; exit 1; }
	@ctest --test-dir $(CMAKE_BUILD) --output-on-failure

# -rs: where this machine does not allow it, the reason is all there is to see.
test-slurm: install
	$(call timed,pytest of tests marked slurm,$(BIN)/python -m pytest -m "slurm and not long" -rs tests/cluster)

evidence-smoke: install
	@$(BIN)/python -m pytest -m long tests/benchmarks/test_evidence.py -k tiny

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info dmjd/*.so .pytest_cache .mypy_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
