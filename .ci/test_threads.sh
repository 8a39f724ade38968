#!/bin/sh
# Runs a test program, if it is one of PROGRAMS: `timed` (the tests on Envoy and those of the daemon, which measure how soon
# it answers), `others`, or empty for all. Three threads run the timed ones on two cores, because these tests wait for a process
# or for time to pass.
skip() {
  echo "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s"
  exit 0
}
cores="$(getconf _NPROCESSORS_ONLN)"
threads=$(((cores * 3 + 1) / 2))
# Cargo runs a test program in the folder of its package.
case "$PWD:${1##*/}" in
  # `make test` compiles and lints the slow drills; only `make e2e-long` runs them.
  *:long-*) skip ;;
  *:e2e-* | *:daemon-*) [ "${PROGRAMS:-timed}" = timed ] || skip ;;
  # These tests wait for etcd, Kubernetes and files most of the time.
  */discovery:*) [ "${PROGRAMS:-others}" = others ] || skip; threads=$((cores * 3)) ;;
  *) [ "${PROGRAMS:-others}" = others ] || skip; threads="$cores" ;;
esac
export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$threads}"
exec "$@"
