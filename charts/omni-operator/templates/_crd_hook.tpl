{{/* Annotations of everything that the CRD upgrade needs; weight orders them: permissions before the Job. */}}
{{- define "omni-operator.crdHook" -}}
helm.sh/hook: pre-upgrade
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
{{- define "omni-operator.crdHookName" -}}
{{ include "omni-operator.name" . | trunc 58 | trimSuffix "-" }}-crds
{{- end -}}
