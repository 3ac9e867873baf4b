{{/* Beginning of all names. */}}
{{- define "bagelplane.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "bagelplane.operator" -}}
{{ include "bagelplane.fullname" . }}-operator
{{- end }}

{{- define "bagelplane.webhook" -}}
{{ include "bagelplane.fullname" . }}-webhook
{{- end }}

{{/* Secret of the webhook's certificate, whoever makes it. */}}
{{- define "bagelplane.certificate" -}}
{{ include "bagelplane.webhook" . }}-certificate
{{- end }}

{{/* Labels of everything. */}}
{{- define "bagelplane.labels" -}}
{{- with .Values.labels }}
{{- toYaml . }}
{{ end -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels that tell the pods of a component: (dict "root" . "component" NAME). */}}
{{- define "bagelplane.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* An image's full name: (dict "root" . "image" IMAGE). */}}
{{- define "bagelplane.image" -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* Metadata of the pods of a component: (dict "root" . "component" NAME). */}}
{{- define "bagelplane.podMetadata" -}}
labels:
  {{- with .root.Values.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- include "bagelplane.selector" . | nindent 2 }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the pods of both components have in common: (dict "root" . "settings" VALUES). */}}
{{- define "bagelplane.podSettings" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the containers of both components have in common: (dict "root" . "settings" VALUES). */}}
{{- define "bagelplane.containerSettings" -}}
image: {{ include "bagelplane.image" (dict "root" .root "image" .root.Values.image.operator) | quote }}
imagePullPolicy: {{ .root.Values.image.operator.pullPolicy }}
env:
  - name: BAGELPLANE_DATAPLANE_IMAGE
    value: {{ include "bagelplane.image" (dict "root" .root "image" .root.Values.image.dataplane) | quote }}
  - name: BAGELPLANE_DATAPLANE_IMAGE_PULL_POLICY
    value: {{ .root.Values.image.dataplane.pullPolicy }}
  - name: BAGELPLANE_SIDECAR_LOG_FORMAT
    value: {{ .root.Values.sidecars.logFormat }}
  {{- with .root.Values.watch.namespaces }}
  - name: BAGELPLANE_NAMESPACES
    value: {{ join "," . | quote }}
  {{- end }}
resources:
  {{- toYaml .settings.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/*
Rights of a component, everywhere or in the watched namespaces alone:
(dict "root" . "component" NAME "name" NAME "rules" YAML).
*/}}
{{- define "bagelplane.rights" -}}
{{- $rights := . }}
{{- $scopes := list (dict "prefix" "Cluster" "namespace" "") }}
{{- if .root.Values.watch.namespaces }}
{{- $scopes = list }}
{{- range .root.Values.watch.namespaces }}
{{- $scopes = append $scopes (dict "prefix" "" "namespace" .) }}
{{- end }}
{{- end }}
{{- range $scopes }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .prefix }}Role
metadata:
  name: {{ $rights.name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "bagelplane.labels" $rights.root | nindent 4 }}
rules:
  {{- $rights.rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ .prefix }}RoleBinding
metadata:
  name: {{ $rights.name }}
  {{- with .namespace }}
  namespace: {{ . }}
  {{- end }}
  labels:
    {{- include "bagelplane.labels" $rights.root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .prefix }}Role
  name: {{ $rights.name }}
subjects:
  - kind: ServiceAccount
    name: {{ $rights.name }}
    namespace: {{ $rights.root.Release.Namespace }}
{{- end }}
{{- end }}
