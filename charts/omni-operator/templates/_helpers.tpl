{{/* Name of every object of the operator. Release names may have 53 characters, so this always fits. */}}
{{- define "omni-operator.name" -}}
{{- if contains "omni-operator" .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ printf "%s-omni-operator" .Release.Name | trunc 63 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{/* Name of every object of the admission webhooks, and of the Secret with their certificates. */}}
{{- define "omni-operator.webhooks" -}}
{{ include "omni-operator.name" . | trunc 40 | trimSuffix "-" }}-webhooks
{{- end -}}

{{- define "omni-operator.webhooksSecret" -}}
{{- if eq .Values.webhooks.certificates.mode "Provided" -}}
{{- required "webhooks.certificates.secretName is needed with mode Provided" .Values.webhooks.certificates.secretName -}}
{{- else -}}
{{ include "omni-operator.webhooks" . }}-tls
{{- end -}}
{{- end -}}

{{/* Not the operator's: its Service and its Deployment must not take these pods for theirs, nor the other way round. */}}
{{- define "omni-operator.webhooksSelectorLabels" -}}
app.kubernetes.io/name: omni-webhooks
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni-operator.webhooksLabels" -}}
{{ include "omni-operator.webhooksSelectorLabels" . }}
{{ include "omni-operator.commonLabels" . }}
{{- end -}}

{{/* Labels that never change: selectors hold these and nothing else (T1). */}}
{{- define "omni-operator.selectorLabels" -}}
app.kubernetes.io/name: omni-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "omni-operator.labels" -}}
{{ include "omni-operator.selectorLabels" . }}
{{ include "omni-operator.commonLabels" . }}
{{- end -}}

{{- define "omni-operator.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: omni-operator
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{- end -}}

{{/* Full reference of the image that .key of `images` names: (dict "root" $ "key" "cpu"). */}}
{{- define "omni-operator.image" -}}
{{- $images := .root.Values.images -}}
{{- $name := index $images .key -}}
{{- if or (kindIs "invalid" $name) (not (kindIs "string" $name)) -}}
{{- fail (printf "images.%s is not set: a profile asks for the image %q" .key .key) -}}
{{- end -}}
{{- if or (contains "@" $name) (contains ":" (base $name)) -}}
{{- $name -}}
{{- else -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $name }}:{{ $images.tag | default .root.Chart.AppVersion -}}
{{- end -}}
{{- end -}}

{{/* What Pod Security Standard "restricted" asks of a pod, and of a container. */}}
{{- define "omni-operator.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "omni-operator.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "omni-operator.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}
