#!/usr/bin/env bash
# Runs Envoy in the foreground. On SIGTERM or SIGINT it first lets requests finish; a SIGTERM to
# Envoy itself would cut every stream. A second signal stops at once. All arguments go to Envoy:
#
#   envoy-config/start.sh -c envoy-config/standalone.yaml
#
#   variable       meaning                                                      default
#   ENVOY          the Envoy binary                                             .venv/bin/envoy if it exists, else envoy
#   ENVOY_ADMIN    Envoy's admin address                                        127.0.0.1:9901
#   DRAIN_SECONDS  how long new requests are still served after the signal,     10
#                  while clients are asked to close their connections; longer
#                  than a load balancer in front needs to notice
#   STOP_SECONDS   how long after the drain running requests are cut            3600, the longest silence in a stream
set -mu -o pipefail # -m: Envoy gets its own process group, so that Ctrl-C reaches only this script

default=envoy; [ -x .venv/bin/envoy ] && default=.venv/bin/envoy
envoy=${ENVOY:-$default}
admin=${ENVOY_ADMIN:-127.0.0.1:9901}
drain_s=${DRAIN_SECONDS:-10}
stop_s=${STOP_SECONDS:-3600}
idle_s=2

# The page that begins a drain. If the configuration has `allow_paths`, the admin port refuses this
# page, because a web page in an operator's browser could request it. So the script allows the page
# with a query that no web page knows. Envoy appends this to the list of the configuration.
read -r secret </proc/sys/kernel/random/uuid
drain="/drain_listeners?graceful&$secret"
grep -qsE '(^|[{,]) *"?allow_paths"?:' -- "$@" &&
  set -- --config-yaml "{admin: {allow_paths: [{exact: '$drain'}]}}" "$@"

# Sends a request to the admin port with bash alone, because images of Envoy often lack curl.
admin() { # method path
  exec 3<>"/dev/tcp/${admin%:*}/${admin##*:}" || return 1
  printf '%s %s HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3; exec 3>&-
} 2>/dev/null

# The numbers of running requests and of open connections of clients (without those of the admin
# port).
active() {
  admin GET '/stats?filter=%5Ehttp%5C..*downstream_(rq|cx)_active%24' |
    awk -F': ' '/^http\.admin\./ {next} /downstream_cx_active/ {c += $2}
      /downstream_rq_active/ {n += $2; seen = 1} END {print seen ? n " " c + 0 : "? ?"}'
}

graceful() {
  trap 'kill -TERM "$pid" 2>/dev/null' TERM INT
  echo "start.sh: draining for $drain_s s" >&2
  if admin POST "$drain" | grep -q ' 200 '; then
    sleep "$drain_s" & wait $!
    # A reply that began before the drain does not ask its client to close the connection, and the
    # client may use it once more when the reply has ended. That request's reply asks it. So Envoy
    # stops only when there are no connections, or no requests for idle_s.
    local end=$((SECONDS + stop_s)) quiet=$SECONDS counts running open
    while counts=$(active); running=${counts% *} open=${counts#* }; [ "$running" != '?' ] && ((SECONDS < end)); do
      [ "$running" = 0 ] || quiet=$SECONDS
      [ "$running" = 0 ] && { [ "$open" = 0 ] || ((SECONDS - quiet > idle_s)); } && break
      sleep 0.2
    done
    [ "$running" = 0 ] || echo "start.sh: ending with ${running} requests under way" >&2
  else
    echo "start.sh: no answer from the admin port at $admin: ending at once" >&2
  fi
  kill -TERM "$pid" 2>/dev/null
}

"$envoy" "$@" --drain-time-s "$drain_s" &
pid=$!
trap graceful TERM INT
# `wait` returns early on a trapped signal, with another status. Only the end of Envoy and its
# status count.
while wait "$pid"; status=$?; kill -0 "$pid" 2>/dev/null; do :; done
((status > 128)) && { wait "$pid"; last=$?; ((last == 127)) || status=$last; }
exit "$status"
