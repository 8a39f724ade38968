#!/usr/bin/env bash
# Runs Envoy in the foreground. Asked to stop (SIGTERM, SIGINT), it lets the requests finish first: a bare SIGTERM to Envoy
# cuts every stream. A second signal stops at once. Arguments go to Envoy as they are:
#
#   envoy-config/start.sh -c envoy-config/standalone.yaml
#
#   ENVOY          the binary                                                 (.venv/bin/envoy if there, else envoy)
#   ENVOY_ADMIN    its admin address                                          (127.0.0.1:9901)
#   DRAIN_SECONDS  new requests are served this long after the signal, while  (10)
#                  connections are asked to close; longer than a load balancer in front takes to notice
#   STOP_SECONDS   what still runs this long after the drain is cut           (3600: the longest silence a stream may have)
set -mu -o pipefail # -m: Envoy gets a process group of its own, so a Ctrl-C reaches this script alone

default=envoy; [ -x .venv/bin/envoy ] && default=.venv/bin/envoy
envoy=${ENVOY:-$default}
admin=${ENVOY_ADMIN:-127.0.0.1:9901}
drain_s=${DRAIN_SECONDS:-10}
stop_s=${STOP_SECONDS:-3600}

# A request to the admin port with what bash has: images of Envoy often lack curl.
admin() { # method path
  exec 3<>"/dev/tcp/${admin%:*}/${admin##*:}" || return 1
  printf '%s %s HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3; exec 3>&-
} 2>/dev/null

# Requests of clients under way (those of the admin port are our own).
active() {
  admin GET '/stats?filter=%5Ehttp%5C..*downstream_rq_active%24' |
    awk -F': ' '/^http\.admin\./ {next} /downstream_rq_active/ {n += $2; seen = 1} END {print seen ? n : "?"}'
}

graceful() {
  trap 'kill -TERM "$pid" 2>/dev/null' TERM INT
  echo "start.sh: draining for $drain_s s" >&2
  if admin POST '/drain_listeners?graceful' | grep -q ' 200 '; then
    sleep "$drain_s" & wait $!
    local end=$((SECONDS + stop_s)) running
    while running=$(active); [ "$running" != 0 ] && [ "$running" != '?' ] && ((SECONDS < end)); do sleep 0.2; done
    [ "$running" = 0 ] || echo "start.sh: ending with ${running} requests under way" >&2
  else
    echo "start.sh: no answer from the admin port at $admin: ending at once" >&2
  fi
  kill -TERM "$pid" 2>/dev/null
}

"$envoy" "$@" --drain-time-s "$drain_s" &
pid=$!
trap graceful TERM INT
# `wait` returns early for a trapped signal, with a status of its own: what counts is the end of Envoy and its status.
while wait "$pid"; status=$?; kill -0 "$pid" 2>/dev/null; do :; done
((status > 128)) && { wait "$pid"; last=$?; ((last == 127)) || status=$last; }
exit "$status"
