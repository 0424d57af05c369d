# What a newcomer, a contributor and .ci/run call. Needs Python 3.11+, a C++20 compiler and make; everything else, cmake and
# ninja included, comes from the versions pinned in constraints.txt into .venv.
PYTHON ?= python3
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

bin := .venv/bin
pip := $(bin)/python -m pip --disable-pip-version-check
# Python compiles what it imports at the first import; to compile all of torch takes longer than to install it.
install := $(pip) install --no-compile -c constraints.txt
core_files := $(filter-out core/tests/%,$(wildcard core/*/*.hpp core/*/*.cpp))
core_test_files := $(wildcard core/tests/*.hpp core/tests/*.cpp)
python_dirs := $(wildcard src tests benchmarks examples)
stub = $(shell $(bin)/python -c 'import pathlib, satrap._core as c; print(pathlib.Path(c.__file__).with_name("_core.pyi"))')
# GCC's thread sanitizer cannot place its shadow memory on kernels with many random address bits.
fixed_addresses := $(shell setarch -R true 2>/dev/null && echo setarch -R)

export CMAKE_BUILD_PARALLEL_LEVEL = $(JOBS)
export CTEST_PARALLEL_LEVEL = $(JOBS)
# Where it is set, as in many images, every process compiles again what it imports: for torch two seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup test core-test python-test fast-test cluster-test public-models check bench demo .demo-setup docs wheel gpu gpu-wheels format stub reference clean
.DEFAULT_GOAL := setup

# Compiling and installing packages beside each other: neither keeps two cores busy all the time.
setup: .venv/.tools
	@$(MAKE) --no-print-directory -j2 .venv/.compiled .venv/.dev
	@$(MAKE) --no-print-directory .venv/.built

# The stamps: the tools that build, again after a change of a version; the compiled core; what training needs; what tests,
# checks and benchmarks need besides; Satrap itself, for which nothing is compiled any more.
.venv/.tools: constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Satrap needs Python 3.11 or newer; found " + sys.version.split()[0] + \
	    ": call make with PYTHON=python3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(pip) --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(install) scikit-build-core nanobind cmake ninja
	touch $@

.venv/.compiled: .venv/.tools CMakeLists.txt $(core_files) src/satrap/errors.py
	env -u MAKEFLAGS $(bin)/python -c 'import scikit_build_core.build as build; \
	    build.build_editable("build/editable", {"build-dir": "build/module"})'
	touch $@

.venv/.train: .venv/.tools
	$(bin)/python tests/requirements.py train >$@.txt
	$(install) -r $@.txt
	touch $@

.venv/.dev: .venv/.train
	$(bin)/python tests/requirements.py dev >$@.txt
	$(install) -r $@.txt
	touch $@

.venv/.built: .venv/.compiled .venv/.train
	$(install) --no-build-isolation --no-deps -C build-dir=build/module -e .
	touch $@

test: setup core-test python-test

# The Triton that torch 2.11 brings: with ALL=1 tests compile the kernels of rows on a GPU with it, too, and run them in its
# interpreter. It is not in .venv, which has a newer one.
older_triton := $(if $(ALL),$(if $(filter x86_64,$(shell uname -m)),build/triton-3.6.0))
build/triton-3.6.0: | .venv/.tools
	rm -rf $@.new
	$(pip) install --no-compile --no-deps --target $@.new triton==3.6.0
	mv $@.new $@

# First the tests that measure time; then two groups, the tests that start no process and those that do, `cluster`. In each,
# tests run beside one another, one more at a time than there are cores since many wait for processes that they killed. Of
# the slowest, which are marked `draw`, each run draws some; ALL=1 runs all of them. SEED=N repeats a run's random draws.
drawn := $(if $(ALL),,--draw) $(SEED:%=--seed %)
beside := $(bin)/python -m pytest -n $$(($(JOBS) + 1)) --dist loadfile --no-loadscope-reorder $(drawn)
run_fast := $(beside) -m "not alone and not cluster"
run_clusters := $(beside) -m "not alone and cluster"
python-test: setup $(older_triton)
	$(bin)/python -m pytest -m alone $(drawn)
	$(run_fast)
	$(run_clusters)
	$(if $(older_triton),PYTHONPATH="$(CURDIR)/$(older_triton)" $(bin)/python -m pytest tests/device/test_triton.py --draw $(SEED:%=--seed %))

# Published models, which tests/public_models converts: without their dependencies, so that torch stays as it is.
public-models: setup
	$(bin)/python tests/requirements.py public-models | grep == >.venv/.public-models.txt
	rm -rf build/public-models
	$(pip) install --no-compile --no-deps --target build/public-models -r .venv/.public-models.txt
	$(bin)/python -m pytest tests/public_models

# One group: the first takes a few minutes.
fast-test: setup
	$(run_fast)

cluster-test: setup
	$(run_clusters)

# Once with the core as Python loads it, and under sanitizers, ASan + UBSan and TSan: ALL=1 under both, else under one of
# them that is drawn, since each is another build of the core.
sanitizers := $(if $(ALL),address thread,$(shell shuf -n 1 -e address thread))
core-test: .venv/.compiled
	$(call run_core_tests,module)
	$(foreach sanitizer,$(sanitizers),$(call run_sanitized,$(sanitizer)))

define run_sanitized
$(bin)/cmake -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(bin)/ninja" -DSATRAP_PYTHON=OFF -DSATRAP_SANITIZE=$(1)
	$(call run_core_tests,$(1))

endef

define run_core_tests
$(bin)/cmake --build build/$(1) --target core_tests
$(fixed_addresses) $(bin)/ctest --test-dir build/$(1) --output-on-failure --no-tests=error
endef

check: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy --strict $(python_dirs)
	$(bin)/clang-format --dry-run -Werror $(core_files) $(core_test_files)
	$(bin)/python -m pytest tests/project/test_layers.py tests/project/test_words.py

bench: setup
	$(bin)/python -m benchmarks.store

# A DLRM on the Adult census data, in one process, with what training needs and nothing else; then the report of that run.
# What `pip install '.[train]'` has put into .venv is used, unless a source is newer.
packages := .venv/lib/*/site-packages
installed := $(and $(wildcard $(packages)/obstore/__init__.py),$(wildcard $(packages)/satrap/__init__.py))
sources := CMakeLists.txt $(core_files) $(shell find src -name '*.py')
demo: $(if $(and $(installed),$(if $(shell find $(sources) -newer $(installed)),,current)),,.demo-setup)
	rm -rf build/demo
	$(bin)/python examples/adult.py --record build/demo
	@echo
	$(bin)/satrap report build/demo
	@echo
	@echo "Shown: examples/adult.py read 32,561 people's answers from a .gz file and trained a DLRM for three epochs; the validation"
	@echo "AUC is that of 16,281 others. The report above is a page for any browser. Next, the script on two servers with two trainers:"
	@echo "    $(if $(wildcard $(packages)/zmq),,$(bin)/pip install pyzmq && )$(bin)/satrap run examples/adult.py --servers 2 --trainers 2 --folder build/demo-run"

.demo-setup: .venv/.tools
	@$(MAKE) --no-print-directory -j2 .venv/.compiled .venv/.train
	@$(MAKE) --no-print-directory .venv/.built

# dist/: the sdist, and a manylinux wheel for $(PYTHON) that was built from it and tested without a compiler.
wheel:
	PYTHON="$(PYTHON)" .ci/wheel

# The device tests and the benchmark of rows on a GPU, in MINUTES and into OUT: on a GPU if there is one, else a dry run.
OUT ?= build/gpu
MINUTES ?= 8
gpu:
	OUT="$(OUT)" MINUTES="$(MINUTES)" PYTHON="$(PYTHON)" .ci/gpu

# build/gpu-wheels: what `make gpu` needs besides torch, Triton and numpy, for $(PYTHON), to be carried to a machine with a GPU.
gpu-wheels: wheel
	rm -rf build/gpu-wheels
	mkdir -p build/gpu-wheels
	cp dist/satrap-*-$$($(PYTHON) -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl build/gpu-wheels
	$(PYTHON) -m pip --disable-pip-version-check download --quiet --only-binary :all: -c constraints.txt -d build/gpu-wheels \
	    pytest pytest-xdist hypothesis pyzmq
	du -ch build/gpu-wheels/*.whl

format: setup
	$(bin)/ruff check --fix .
	$(bin)/ruff format .
	$(bin)/clang-format -i $(core_files) $(core_test_files)

# build/site: docs/, README.md and others as a site; a warning (a broken link, a page that is in no menu) is an error.
.venv/.docs: .venv/.tools
	$(bin)/python tests/requirements.py docs >$@.txt
	$(install) -r $@.txt
	touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict --quiet
	@echo build/site/index.html

# docs/reference/ from the docstrings; docs/cli.md from the parsers; docs/metrics.md and deploy/grafana from the table of
# metrics. Tests compare them.
reference: setup
	$(bin)/python docs/reference.py
	$(bin)/python docs/cli.py
	$(bin)/python docs/metrics.py

# The committed copy of the generated stub, for mypy and for readers; a test compares the two.
stub: setup
	cp "$(stub)" src/satrap/_core.pyi

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .venv/.compiled .venv/.built
