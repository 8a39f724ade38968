{{- /* Names, labels and images. */ -}}

{{- /* The first part of all names: the name of the release. */ -}}
{{- define "switchpoint.fullname" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "switchpoint.daemon" -}}{{ include "switchpoint.fullname" . }}-daemon{{- end -}}
{{- define "switchpoint.gateway" -}}{{ include "switchpoint.fullname" . }}-gateway{{- end -}}

{{- /* The Service of a pool's picker: a list of the root and the pool. */ -}}
{{- define "switchpoint.picker" -}}{{ include "switchpoint.fullname" (index . 0) }}-picker-{{ (index . 1).name }}{{- end -}}

{{- /* The DNS name of the daemon's Service. Its certificate is for this name. */ -}}
{{- define "switchpoint.daemonHost" -}}
{{ include "switchpoint.daemon" . }}.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "switchpoint.serviceAccount" -}}{{ default (include "switchpoint.daemon" .) .Values.serviceAccount.name }}{{- end -}}

{{- /* Labels of all objects. */ -}}
{{- define "switchpoint.labels" -}}
app.kubernetes.io/part-of: switchpoint
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Labels that select the pods of a part: a list of the root and the part. */ -}}
{{- define "switchpoint.selector" -}}
app.kubernetes.io/name: switchpoint-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end -}}

{{- /* An image: a list of the root and `image` of a part. */ -}}
{{- define "switchpoint.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
{{ $root.Values.image.registry }}/{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}{{ end -}}
{{- end -}}

{{- /* Settings of all containers. */ -}}
{{- define "switchpoint.containerSecurity" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end -}}

{{- /* Settings of all pods. */ -}}
{{- define "switchpoint.podSecurity" -}}
{runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
{{- end -}}

{{- /* Where pods of a part run: a list of the root, the part and its values. */ -}}
{{- define "switchpoint.scheduling" -}}
{{- $root := index . 0 -}}{{- $values := index . 2 -}}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with $values.affinity }}
affinity: {{ toJson . }}
{{- end }}
topologySpreadConstraints:
{{- if $values.topologySpreadConstraints }}
{{ toYaml $values.topologySpreadConstraints }}
{{- else }}
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  # A new version spreads on its own, without the pods that it replaces.
  matchLabelKeys: [pod-template-hash]
  labelSelector: {matchLabels: {{ include "switchpoint.selector" (list $root (index $ 1)) | fromYaml | toJson }}}
{{- end }}
{{- end }}
{{- end -}}
