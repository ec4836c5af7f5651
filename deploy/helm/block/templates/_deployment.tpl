{{/*
The Deployment of a part. Call with a dict of
  root, part, values; args, ports and probes as texts; token, whether the pod calls the API server;
  mounts, volumes and containers, more of them as texts; preStopSeconds, where it differs.
*/}}
{{- define "block.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "block.fullname" .root }}-{{ .part }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "block.labels" . | nindent 4 }}
spec:
  replicas: {{ .values.replicas }}
  strategy: {type: RollingUpdate, rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}
  selector:
    matchLabels: {{ include "block.selectorLabels" . | nindent 6 }}
  template:
    {{- include "block.pod" . | nindent 4 }}
{{- end -}}

{{/* The pod template of a part, with the same dict. */}}
{{- define "block.pod" -}}
metadata:
  labels: {{ include "block.labels" . | nindent 4 }}
  {{- with include "block.podAnnotations" . | trim }}
  annotations: {{ . | nindent 4 }}
  {{- end }}
spec:
  {{- include "block.podSpec" . | nindent 2 }}
  containers:
    - name: {{ .part }}
      image: {{ include "block.image" (dict "image" .root.Values.image "tag" .root.Chart.AppVersion) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args:
        {{- .args | trim | nindent 8 }}
        {{- include "block.linkFlags" . | nindent 8 }}
        {{- include "block.logFlags" .root | nindent 8 }}
        {{- with include "block.flags" .values.flags | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      env: {{ include "block.env" .values.env | nindent 8 }}
      ports: {{ .ports | trim | nindent 8 }}
      lifecycle: {preStop: {sleep: {seconds: {{ default .root.Values.preStopSeconds .preStopSeconds }}}}}
      {{- .probes | trim | nindent 6 }}
      resources: {{ toYaml .values.resources | nindent 8 }}
      securityContext: {{ toYaml .root.Values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "block.mounts" .root.Values | nindent 8 }}
        {{- with .mounts }}
        {{- . | trim | nindent 8 }}
        {{- end }}
    {{- with .containers }}
    {{- . | trim | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "block.volumes" .root | nindent 4 }}
    {{- with .volumes }}
    {{- . | trim | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* A Service of a part; call with root, part, ports as a text. */}}
{{- define "block.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "block.fullname" .root }}-{{ .part }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "block.labels" . | nindent 4 }}
  {{- with .annotations }}
  annotations: {{ toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .type }}
  type: {{ . }}
  {{- end }}
  {{- if .headless }}
  clusterIP: None
  {{- end }}
  selector: {{ include "block.selectorLabels" . | nindent 4 }}
  ports: {{ .ports | trim | nindent 4 }}
{{- end -}}
