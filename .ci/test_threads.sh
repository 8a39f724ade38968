#!/bin/sh
# Runs a test program with three threads for two cores, because many tests wait for a daemon, an etcd or an API server. Tests on a
# real Envoy have one thread for each core: more at once would disturb those that measure times.
case "$1" in
  */e2e-*) ;;
  *) export RUST_TEST_THREADS="${RUST_TEST_THREADS:-$((($(getconf _NPROCESSORS_ONLN) * 3 + 1) / 2))}" ;;
esac
exec "$@"
