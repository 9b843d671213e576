{{- define "kestrel.selector" -}}
app.kubernetes.io/name: kestrel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kestrel.labels" -}}
{{ include "kestrel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kestrel.secret" -}}
{{- if and .Values.existingSecret .Values.apiKeys -}}
{{- fail "apiKeys: belong into the file of existingSecret; leave one of them out" -}}
{{- else if not (or .Values.existingSecret .Values.apiKeys .Values.settings.insecure) -}}
{{- fail "apiKeys: give at least one, or existingSecret, or settings.insecure=true for a server that anybody may use" -}}
{{- end -}}
{{- if .Values.existingSecret }}{{ .Values.existingSecret }}{{ else if .Values.apiKeys }}{{ .Release.Name }}{{ end -}}
{{- end }}

{{- define "kestrel.claim" -}}
{{- if .Values.models.existingClaim }}{{ .Values.models.existingClaim }}{{ else if .Values.models.size }}{{ .Release.Name }}-models{{ end -}}
{{- end }}
