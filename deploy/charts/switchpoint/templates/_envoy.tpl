{{- /* Envoy's configuration, made from the files of envoy-config, which `files/` links. Each template returns YAML. */ -}}

{{- /* The mutual TLS of mtls.yaml. Envoy reads the certificates by SDS, from two files that name those of the Secret, and again
when the Secret changes. */ -}}
{{- define "switchpoint.envoyTls" -}}
{{- $socket := (.Files.Get "files/mtls.yaml" | fromYaml).transport_socket -}}
{{- $_ := set $socket.typed_config "sni" (include "switchpoint.daemonHost" .) -}}
{{- $common := omit $socket.typed_config.common_tls_context "tls_certificates" "validation_context" -}}
{{- $certificate := dict "name" "certificate" "sds_config" (dict "resource_api_version" "V3" "path_config_source" (dict "path" "/etc/switchpoint/certificate.yaml")) -}}
{{- $ca := dict "name" "ca" "sds_config" (dict "resource_api_version" "V3" "path_config_source" (dict "path" "/etc/switchpoint/ca.yaml")) -}}
{{- $_ := set $common "tls_certificate_sds_secret_configs" (list $certificate) -}}
{{- $_ := set $common "validation_context_sds_secret_config" $ca -}}
{{- $_ := set $socket.typed_config "common_tls_context" $common -}}
{{- toYaml $socket -}}
{{- end -}}

{{- /* The SDS file of the proxy's certificate. */ -}}
{{- define "switchpoint.sdsCertificate" -}}
resources:
- "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret
  name: certificate
  tls_certificate:
    certificate_chain: {filename: /etc/switchpoint-tls/tls.crt}
    private_key: {filename: /etc/switchpoint-tls/tls.key}
    # The kubelet replaces a link in this folder when the Secret changes.
    watched_directory: {path: /etc/switchpoint-tls}
{{- end -}}

{{- /* The SDS file of the CA that signs the daemon's certificate. */ -}}
{{- define "switchpoint.sdsCa" -}}
resources:
- "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret
  name: ca
  validation_context:
    trusted_ca: {filename: /etc/switchpoint-tls/ca.crt}
    watched_directory: {path: /etc/switchpoint-tls}
{{- end -}}

{{- /* The cluster of the daemon: a list of the root, and the cluster of a file of envoy-config. */ -}}
{{- define "switchpoint.stateCluster" -}}
{{- $root := index . 0 -}}{{- $cluster := deepCopy (index . 1) -}}
{{- $endpoint := (first (first $cluster.load_assignment.endpoints).lb_endpoints).endpoint -}}
{{- $_ := set $endpoint.address.socket_address "address" (include "switchpoint.daemonHost" $root) -}}
{{- if $cluster.transport_socket -}}
{{- $_ := set $cluster.transport_socket.typed_config "sni" (include "switchpoint.daemonHost" $root) -}}
{{- else -}}
{{- $_ := set $cluster "transport_socket" (include "switchpoint.envoyTls" $root | fromYaml) -}}
{{- end -}}
{{- toYaml $cluster -}}
{{- end -}}

{{- /* The cluster of a pool: a list of the root, the pool, and the cluster of a file of envoy-config. */ -}}
{{- define "switchpoint.poolCluster" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}{{- $cluster := deepCopy (index . 2) -}}
{{- if eq (default "http" $pool.appProtocol) "kubernetes.io/h2c" -}}
{{- $fragment := $root.Files.Get "files/h2c.yaml" | fromYaml -}}
{{- $_ := set $cluster "typed_extension_protocol_options" $fragment.typed_extension_protocol_options -}}
{{- end -}}
{{- $_ := set $cluster "name" (printf "inference-pool-%s" $pool.name) -}}
{{- $_ := set $cluster.eds_cluster_config "service_name" $pool.name -}}
{{- toYaml $cluster -}}
{{- end -}}

{{- /* The routes of a pool: a list of the pool, and the routes of a file of envoy-config. */ -}}
{{- define "switchpoint.poolRoutes" -}}
{{- $pool := index . 0 -}}{{- $routes := deepCopy (index . 1) -}}
{{- range $routes -}}
{{- if .route -}}
{{- $_ := set .route "cluster" (printf "inference-pool-%s" $pool.name) -}}
{{- $_ := set . "metadata" (dict "filter_metadata" (dict "switchpoint" (dict "pool" $pool.name))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $routes -}}
{{- end -}}

{{- /* The virtual hosts of all pools: a list of the root, and the virtual host of standalone.yaml. */ -}}
{{- define "switchpoint.virtualHosts" -}}
{{- $root := index . 0 -}}{{- $shipped := index . 1 -}}{{- $all := list -}}{{- $any := false -}}
{{- range $pool := $root.Values.pools -}}
{{- $host := deepCopy $shipped -}}
{{- $hosts := default (list "*") $pool.hosts -}}
{{- if has "*" $hosts }}{{ $any = true }}{{ end -}}
{{- $_ := set $host "name" $pool.name -}}
{{- $_ := set $host "domains" $hosts -}}
{{- $_ := set $host "routes" (include "switchpoint.poolRoutes" (list $pool $shipped.routes) | fromYamlArray) -}}
{{- $all = append $all $host -}}
{{- end -}}
{{- if not $any -}}
{{- /* The kubelet's probe has the pod's address as host. */ -}}
{{- $routes := list -}}
{{- range (first $all).routes }}{{ if or (eq (default "" .match.path) "/switchpoint/ready") (eq (default "" .match.prefix) "/") }}{{ $routes = append $routes . }}{{ end }}{{ end -}}
{{- $all = append $all (dict "name" "ready" "domains" (list "*") "routes" $routes) -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* The HTTP filters of standalone.yaml, for these pools. */ -}}
{{- define "switchpoint.httpFilters" -}}
{{- $root := index . 0 -}}{{- $filters := deepCopy (index . 1) -}}
{{- range $filters -}}
{{- if eq .name "switchpoint" -}}
{{- $_ := set .typed_config.config.vm_config.code.local "filename" (index $ 2) -}}
{{- $_ := set .typed_config.config.configuration "value" (include "switchpoint.pickerConfig" $root) -}}
{{- end -}}
{{- end -}}
{{- toYaml $filters -}}
{{- end -}}

{{- /* A listener for Prometheus and the kubelet: the metrics and the liveness of Envoy, and no other page of its admin port. */ -}}
{{- define "switchpoint.metricsListener" -}}
name: metrics
address: {socket_address: {address: 0.0.0.0, port_value: 9902}}
filter_chains:
- filters:
  - name: envoy.filters.network.http_connection_manager
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
      # start.sh does not wait for requests whose statistics begin with `admin.`.
      stat_prefix: admin.metrics
      route_config:
        virtual_hosts:
        - name: metrics
          domains: ["*"]
          routes:
          - {match: {path: /stats/prometheus}, route: {cluster: admin}}
          - {match: {path: /ready}, route: {cluster: admin}}
      http_filters:
      - name: envoy.filters.http.router
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
{{- end -}}

{{- define "switchpoint.adminCluster" -}}
name: admin
type: STATIC
connect_timeout: 1s
load_assignment:
  cluster_name: admin
  endpoints:
  - lb_endpoints:
    - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
{{- end -}}

{{- /* The clusters of a proxy: the pools and the daemon. */ -}}
{{- define "switchpoint.clusters" -}}
{{- $root := . -}}
{{- $clusters := list -}}
{{- range $cluster := (.Files.Get "files/standalone.yaml" | fromYaml).static_resources.clusters -}}
{{- if eq $cluster.name "switchpoint-state" -}}
{{- $clusters = append $clusters (include "switchpoint.stateCluster" (list $root $cluster) | fromYaml) -}}
{{- else if eq $cluster.name "inference-pool" -}}
{{- range $pool := $root.Values.pools -}}
{{- $clusters = append $clusters (include "switchpoint.poolCluster" (list $root $pool $cluster) | fromYaml) -}}
{{- end -}}
{{- else -}}
{{- fail (printf "standalone.yaml has an unknown cluster %q" $cluster.name) -}}
{{- end -}}
{{- end -}}
{{- toYaml $clusters -}}
{{- end -}}

{{- /* The filter of an access log that has all failures and some of the other requests, as in a comment of standalone.yaml. */ -}}
{{- define "switchpoint.sampledLog" -}}
or_filter:
  filters:
  - runtime_filter:
      runtime_key: switchpoint.access_log_percent
      percent_sampled: {numerator: {{ .Values.gateway.accessLogPercent }}}
  - status_code_filter:
      comparison: {op: GE, value: {default_value: 400, runtime_key: switchpoint.access_log_status}}
{{- end -}}

{{- /* The HTTP filters with the native module of native.yaml in place of the wasm filter: a list of the root, and the filters. */ -}}
{{- define "switchpoint.nativeFilters" -}}
{{- $root := index . 0 -}}{{- $filters := list -}}
{{- range index . 1 -}}
{{- if eq .name "switchpoint" -}}
{{- $native := $root.Files.Get "files/native.yaml" | fromYaml -}}
{{- $_ := set $native.typed_config.filter_config "value" (include "switchpoint.pickerConfig" $root) -}}
{{- $filters = append $filters $native -}}
{{- else if ne .name "header_to_metadata" -}}
{{- $filters = append $filters . -}}
{{- end -}}
{{- end -}}
{{- toYaml $filters -}}
{{- end -}}

{{- /* The whole configuration of the gateway. */ -}}
{{- define "switchpoint.gatewayConfig" -}}
{{- include "switchpoint.checkPools" . -}}
{{- $config := .Files.Get "files/standalone.yaml" | fromYaml -}}
{{- $_ := set $config "node" (dict "cluster" (include "switchpoint.gateway" .)) -}}
{{- $listener := first $config.static_resources.listeners -}}
{{- $_ := set $listener.address.socket_address "address" "0.0.0.0" -}}
{{- $manager := (first (first $listener.filter_chains).filters).typed_config -}}
{{- $_ := set $manager "http_filters" (include "switchpoint.httpFilters" (list . $manager.http_filters "/switchpoint.wasm") | fromYamlArray) -}}
{{- if .Values.gateway.native -}}
{{- $_ := set $manager "http_filters" (include "switchpoint.nativeFilters" (list . $manager.http_filters) | fromYamlArray) -}}
{{- $keepNames := dict "envoy.reloadable_features.dynamic_modules_strip_custom_stat_prefix" true -}}
{{- $_ := set $config "layered_runtime" (dict "layers" (list (dict "name" "metrics" "static_layer" $keepNames))) -}}
{{- end -}}
{{- $_ := set $manager.route_config "virtual_hosts" (include "switchpoint.virtualHosts" (list . (first $manager.route_config.virtual_hosts)) | fromYamlArray) -}}
{{- if lt (int .Values.gateway.accessLogPercent) 100 -}}
{{- $_ := set (first $manager.access_log) "filter" (include "switchpoint.sampledLog" . | fromYaml) -}}
{{- end -}}
{{- /* `hosts` of pools have no ports. */ -}}
{{- $_ := set $manager.route_config "ignore_port_in_host_matching" true -}}
{{- $_ := set $config.static_resources "listeners" (list $listener (include "switchpoint.metricsListener" . | fromYaml)) -}}
{{- $clusters := include "switchpoint.clusters" . | fromYamlArray -}}
{{- $_ := set $config.static_resources "clusters" (append $clusters (include "switchpoint.adminCluster" . | fromYaml)) -}}
{{- $heap := first $config.overload_manager.resource_monitors -}}
{{- $_ := set $heap.typed_config "max_heap_size_bytes" (int64 .Values.gateway.maxHeapBytes) -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* The routes of all pools in one virtual host: a list of the root, and the routes of gateway.yaml. A pool with `hosts` gets the
requests of these hosts; its routes come before those of the pool that has all hosts. */ -}}
{{- define "switchpoint.envoyGatewayRoutes" -}}
{{- $root := index . 0 -}}{{- $shipped := index . 1 -}}
{{- $served := list -}}{{- $rest := list -}}
{{- range $shipped }}{{ if .route }}{{ $served = append $served . }}{{ else }}{{ $rest = append $rest . }}{{ end }}{{ end -}}
{{- $named := list -}}{{- $others := list -}}
{{- range $pool := $root.Values.pools -}}
{{- $routes := include "switchpoint.poolRoutes" (list $pool $served) | fromYamlArray -}}
{{- $hosts := default (list "*") $pool.hosts -}}
{{- if has "*" $hosts -}}
{{- $others = concat $others $routes -}}
{{- else -}}
{{- $patterns := list -}}
{{- range $hosts }}{{ $patterns = append $patterns (regexQuoteMeta . | replace "\\*" "[^.]+") }}{{ end -}}
{{- $match := dict "name" ":authority" "string_match" (dict "safe_regex" (dict "regex" (printf "(%s)(:[0-9]+)?" (join "|" $patterns)))) -}}
{{- range $routes }}{{ $_ := set .match "headers" (list $match) }}{{ end -}}
{{- $named = concat $named $routes -}}
{{- end -}}
{{- end -}}
{{- if not $others -}}
{{- /* The kubelet's probe has the pod's address as host. */ -}}
{{- range include "switchpoint.poolRoutes" (list (first $root.Values.pools) $served) | fromYamlArray -}}
{{- if eq (default "" .match.path) "/switchpoint/ready" }}{{ $others = append $others . }}{{ end -}}
{{- end -}}
{{- end -}}
{{- concat $named $others $rest | toYaml -}}
{{- end -}}
