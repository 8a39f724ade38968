{{- /* The Secrets with certificates. */ -}}

{{- define "switchpoint.daemonSecret" -}}
{{- default (printf "%s-tls" (include "switchpoint.daemon" .)) .Values.tls.existingSecret.daemon -}}
{{- end -}}

{{- define "switchpoint.proxySecret" -}}
{{- default (printf "%s-proxy-tls" (include "switchpoint.fullname" .)) .Values.tls.existingSecret.proxy -}}
{{- end -}}

{{- /* The namespaces of proxies, as a list in YAML. Each needs the proxy's Secret. */ -}}
{{- define "switchpoint.proxyNamespaces" -}}
{{- $all := list -}}
{{- if .Values.gateway.enabled }}{{ $all = append $all .Release.Namespace }}{{ end -}}
{{- if .Values.istio.enabled }}{{ $all = append $all .Values.istio.namespace }}{{ end -}}
{{- if .Values.envoyGateway.enabled }}{{ $all = append $all .Values.envoyGateway.proxyNamespace }}{{ end -}}
{{- if .Values.sidecar.enabled }}{{ $all = concat $all (default (list .Release.Namespace) .Values.sidecar.namespaces) }}{{ end -}}
{{- uniq $all | sortAlpha | toYaml -}}
{{- end -}}

{{- /* The DNS names of the daemon's certificate, as a list in YAML. */ -}}
{{- define "switchpoint.daemonNames" -}}
{{- $daemon := include "switchpoint.daemon" . -}}
{{- $names := list (include "switchpoint.daemonHost" .) (printf "%s.%s.svc" $daemon .Release.Namespace) -}}
{{- if .Values.extProc.enabled -}}
{{- range .Values.pools -}}
{{- if include "switchpoint.inferencePool" . }}{{ $names = append $names (printf "%s.%s.svc" (include "switchpoint.picker" (list $ .)) $.Release.Namespace) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $names -}}
{{- end -}}

{{- /* The name in the certificate of a namespace's proxies: a list of the root and the namespace. */ -}}
{{- define "switchpoint.proxyName" -}}
{{- printf "proxy.%s.%s" (include "switchpoint.fullname" (index . 0)) (index . 1) -}}
{{- end -}}

{{- /* The pools of a namespace's proxies, as a list in YAML: a list of the root and the namespace. */ -}}
{{- define "switchpoint.poolsOf" -}}
{{- $namespace := index . 1 -}}{{- $pools := list -}}
{{- range (index . 0).Values.pools -}}
{{- if or (not .proxyNamespaces) (has $namespace .proxyNamespaces) }}{{ $pools = append $pools . }}{{ end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{- /* The names of client certificates that give access to pools, as a list in YAML: NAME to every pool, POOL=NAME to one. */ -}}
{{- define "switchpoint.clientNames" -}}
{{- $root := . -}}{{- $names := list -}}
{{- if not .Values.tls.existingSecret.daemon -}}
{{- range $namespace := append (include "switchpoint.proxyNamespaces" . | fromYamlArray) .Release.Namespace | uniq | sortAlpha -}}
{{- $name := include "switchpoint.proxyName" (list $root $namespace) -}}
{{- $pools := include "switchpoint.poolsOf" (list $root $namespace) | fromYamlArray -}}
{{- if eq (len $pools) (len $root.Values.pools) -}}
{{- $names = append $names $name -}}
{{- else -}}
{{- range $pools }}{{ $names = append $names (printf "%s=%s" .name $name) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- concat $names .Values.tls.clientNames | toYaml -}}
{{- end -}}

{{- /* The Secrets that the leading daemon renews, as a list of NAMESPACE/NAME=DNS[+DNS] in YAML. */ -}}
{{- define "switchpoint.renewedSecrets" -}}
{{- $root := . -}}{{- $all := list -}}
{{- if and .Values.tls.renew (not .Values.tls.certManager.enabled) (not .Values.tls.existingSecret.daemon) -}}
{{- $all = append $all (printf "%s/%s=%s" .Release.Namespace (include "switchpoint.daemonSecret" .) (include "switchpoint.daemonNames" . | fromYamlArray | join "+")) -}}
{{- range append (include "switchpoint.proxyNamespaces" . | fromYamlArray) .Release.Namespace | uniq | sortAlpha -}}
{{- $all = append $all (printf "%s/%s=%s" . (include "switchpoint.proxySecret" $root) (include "switchpoint.proxyName" (list $root .))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{- /* The data of a leaf's Secret: a list of the root, the Secret's namespace, its name, the DNS names and the CA. Keeps the
certificate of the Secret in the cluster if it has the wanted generation and names, and a third of its time is not over. */ -}}
{{- define "switchpoint.leaf" -}}
{{- $root := index . 0 -}}{{- $names := index . 3 -}}{{- $ca := index . 4 -}}
{{- $today := div (now | unixEpoch | int64) 86400 -}}{{- $made := $today -}}
{{- $wanted := printf "%d %s" (int $root.Values.tls.generation) (join "," $names) -}}
{{- $found := lookup "v1" "Secret" (index . 1) (index . 2) -}}
{{- $data := dict -}}
{{- if $found -}}
  {{- $since := dig "metadata" "annotations" "switchpoint/made-on-day" "0" $found | int64 -}}
  {{- $old := gt (sub $today $since) (div (int $root.Values.tls.days) 3) -}}
  {{- /* While the CA changes, the previous one's certificates stay. */ -}}
  {{- if and (eq (dig "metadata" "annotations" "switchpoint/certificate" "" $found) $wanted) (or $ca.changes (not $old)) -}}
    {{- $data = $found.data -}}{{- $made = $since -}}
  {{- end -}}
{{- end -}}
{{- if not (get $data "tls.key") -}}
  {{- /* A proxy's Secret may be another namespace's, which must not stop the upgrade: the new CA signs it. */ -}}
  {{- if and $found $ca.changes (eq (index . 2) (include "switchpoint.daemonSecret" $root)) -}}
    {{- fail "tls.caGeneration is new, so tls.generation and the daemon's names must stay: raise tls.generation some minutes later, when all pods trust the new CA" -}}
  {{- end -}}
  {{- $pair := genSignedCert (first $names) nil $names (int $root.Values.tls.days) $ca.signer -}}
  {{- $data = dict "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key) -}}
{{- end -}}
annotations: {switchpoint/certificate: {{ $wanted | quote }}, switchpoint/made-on-day: {{ $made | quote }}}
data:
  tls.crt: {{ get $data "tls.crt" }}
  tls.key: {{ get $data "tls.key" }}
  ca.crt: {{ b64enc $ca.bundle }}
{{- end -}}
