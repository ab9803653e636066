{{- define "loraplex.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "loraplex.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "loraplex.labels" -}}
{{ include "loraplex.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "loraplex.image" -}}
{{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) | quote }}
{{- end }}

{{- /* Options of a command, as a list of words. */}}
{{- define "loraplex.options" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $name | quote }}
{{- else }}
- {{ printf "--%s" $name | quote }}
- {{ if and (kindIs "float64" $value) (eq (float64 (int64 $value)) $value) }}{{ int64 $value | toString | quote }}
  {{- else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "loraplex.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "loraplex.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "loraplex.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
