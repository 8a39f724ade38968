#!/bin/sh
# Runs a test program with three threads for two cores, because many tests wait for a process or for time to pass.
case "$1" in
  # `make test` compiles and lints the slow drills; only `make e2e-long` runs them.
  */long-*) echo "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s"; exit 0 ;;
esac
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((($(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2))}"
exec "$@"
