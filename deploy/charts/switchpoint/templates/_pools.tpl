{{- /* The pools, as the daemon and the proxies read them. */ -}}

{{- /* The namespace of a pool: a list of the root and the pool. */ -}}
{{- define "switchpoint.poolNamespace" -}}{{ default (index . 0).Release.Namespace (index . 1).namespace }}{{- end -}}

{{- /* The name of a pool's InferencePool; empty if it has none. */ -}}
{{- define "switchpoint.inferencePool" -}}
{{- if .modelServers }}{{ .name }}{{ else if .inferencePool }}{{ .inferencePool.name }}{{ end -}}
{{- end -}}

{{- /* Refuses pools that cannot work. */ -}}
{{- define "switchpoint.checkPools" -}}
{{- $root := . -}}
{{- $names := dict -}}{{- $hosts := dict -}}
{{- $proxies := or .Values.gateway.enabled .Values.sidecar.enabled .Values.istio.enabled .Values.envoyGateway.enabled -}}
{{- range $pool := .Values.pools -}}
  {{- if hasKey $names $pool.name }}{{ fail (printf "pools: two pools are named %q" $pool.name) }}{{ end -}}
  {{- $_ := set $names $pool.name true -}}
  {{- $sources := 0 -}}
  {{- range list "modelServers" "inferencePool" "kubernetes" "etcd" "endpoints" -}}
    {{- if hasKey $pool . }}{{ $sources = add1 $sources }}{{ end -}}
  {{- end -}}
  {{- if ne (int $sources) 1 -}}
    {{- fail (printf "pools: pool %q has %d sources of endpoints; give one of modelServers, inferencePool, kubernetes, etcd and endpoints" $pool.name $sources) -}}
  {{- end -}}
  {{- range default (list "*") $pool.hosts -}}
    {{- if and $proxies (hasKey $hosts .) -}}
      {{- fail (printf "pools: pools %q and %q both take requests for host %q; give each its own `hosts`" (get $hosts .) $pool.name .) -}}
    {{- end -}}
    {{- $_ := set $hosts . $pool.name -}}
  {{- end -}}
  {{- $gateways := list -}}
  {{- if $root.Values.gateway.enabled }}{{ $gateways = append $gateways $root.Release.Namespace }}{{ end -}}
  {{- if $root.Values.istio.enabled }}{{ $gateways = append $gateways $root.Values.istio.namespace }}{{ end -}}
  {{- if $root.Values.envoyGateway.enabled }}{{ $gateways = append $gateways $root.Values.envoyGateway.proxyNamespace }}{{ end -}}
  {{- range $gateways -}}
    {{- if and $pool.proxyNamespaces (not (has . $pool.proxyNamespaces)) -}}
      {{- fail (printf "pools: pool %q has `proxyNamespaces` without %q, where a gateway serves all pools" $pool.name .) -}}
    {{- end -}}
  {{- end -}}
  {{- if and $root.Values.extProc.enabled (include "switchpoint.inferencePool" $pool) (ne (include "switchpoint.poolNamespace" (list $root $pool)) $root.Release.Namespace) -}}
    {{- fail (printf "extProc: pool %q is in namespace %q, but an InferencePool can only name a picker in its own namespace; install a release there, or turn extProc off" $pool.name $pool.namespace) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- /* The file of pools of the daemon. */ -}}
{{- define "switchpoint.poolsFile" -}}
{{- include "switchpoint.checkPools" . -}}
{{- $root := . -}}
pools:
{{- range $pool := .Values.pools }}
{{- $namespace := include "switchpoint.poolNamespace" (list $root $pool) }}
{{- $entry := dict "name" $pool.name }}
{{- if $pool.modelServers }}{{ $_ := set $entry "inferencePool" (dict "kubeNamespace" $namespace "name" $pool.name) }}{{ end }}
{{- if $pool.inferencePool }}{{ $_ := set $entry "inferencePool" (merge (dict "kubeNamespace" $namespace) $pool.inferencePool) }}{{ end }}
{{- if $pool.kubernetes }}{{ $_ := set $entry "kubernetes" (merge (dict "kubeNamespace" $namespace) $pool.kubernetes) }}{{ end }}
{{- range $source := list "etcd" "endpoints" }}
{{- if hasKey $pool $source }}{{ $_ := set $entry $source (get $pool $source) }}{{ end }}
{{- end }}
{{- if not (and (hasKey $pool "objects") (not $pool.objects)) }}{{ $_ := set $entry "objectsKubernetes" $namespace }}{{ end }}
{{- if $pool.strictModels }}{{ $_ := set $entry "strictModels" true }}{{ end }}
{{- if $pool.config }}{{ $_ := set $entry "config" (printf "/etc/switchpointd/config-%s.yaml" $pool.name) }}{{ end }}
- {{ toJson $entry }}
{{- end }}
{{- end -}}

{{- /* The configuration of the picker in a proxy. */ -}}
{{- define "switchpoint.pickerConfig" -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pools = append $pools (dict "name" .name "clusters" (list (printf "inference-pool-%s" .name))) -}}
{{- end -}}
{{- merge (dict "state" (dict "cluster" "switchpoint-state") "pools" $pools) .Values.picker | toJson -}}
{{- end -}}
