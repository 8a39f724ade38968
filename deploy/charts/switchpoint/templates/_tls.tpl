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

{{- define "switchpoint.proxyNames" -}}
{{- list (printf "proxy.%s.%s" (include "switchpoint.fullname" .) .Release.Namespace) | toYaml -}}
{{- end -}}

{{- /* The data of a leaf's Secret: a list of the root, the Secret's name, the DNS names and the CA. Keeps the certificate of the
Secret in the cluster if it has the wanted generation and names. */ -}}
{{- define "switchpoint.leaf" -}}
{{- $root := index . 0 -}}{{- $names := index . 2 -}}{{- $ca := index . 3 -}}
{{- $wanted := printf "%d %s" (int $root.Values.tls.generation) (join "," $names) -}}
{{- $found := lookup "v1" "Secret" $root.Release.Namespace (index . 1) -}}
{{- $data := dict -}}
{{- if $found -}}
  {{- if eq (dig "metadata" "annotations" "switchpoint/certificate" "" $found) $wanted }}{{ $data = $found.data }}{{ end -}}
{{- end -}}
{{- if not (get $data "tls.key") -}}
  {{- if and $found $ca.changes -}}
    {{- fail "tls.caGeneration is new, so tls.generation and the daemon's names must stay: raise tls.generation some minutes later, when all pods trust the new CA" -}}
  {{- end -}}
  {{- $made := genSignedCert (first $names) nil $names (int $root.Values.tls.days) $ca.signer -}}
  {{- $data = dict "tls.crt" (b64enc $made.Cert) "tls.key" (b64enc $made.Key) -}}
{{- end -}}
annotations: {switchpoint/certificate: {{ $wanted | quote }}}
data:
  tls.crt: {{ get $data "tls.crt" }}
  tls.key: {{ get $data "tls.key" }}
  ca.crt: {{ b64enc $ca.bundle }}
{{- end -}}
