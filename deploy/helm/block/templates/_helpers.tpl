{{/* Names, labels, images, and what the containers of all parts share. */}}

{{- define "block.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "block.poolName" -}}
{{- default .Release.Name .Values.router.inferencePool.name -}}
{{- end -}}

{{- define "block.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "block.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Only the provisioner may change anything, so it has an account of its own. */}}
{{- define "block.provisionerAccountName" -}}
{{- $suffix := ternary "-provisioner" "" .Values.serviceAccount.create -}}
{{- printf "%s%s" (include "block.serviceAccountName" .) $suffix -}}
{{- end -}}

{{- define "block.image" -}}
{{- $image := .image -}}
{{- $name := $image.repository -}}
{{- if $image.registry -}}{{- $name = printf "%s/%s" $image.registry $image.repository -}}{{- end -}}
{{- if $image.digest -}}{{ $name }}@{{ $image.digest }}{{- else -}}{{ $name }}:{{ default .tag $image.tag }}{{- end -}}
{{- end -}}

{{/* Labels of an object; call with (dict "root" . "part" "picker"). */}}
{{- define "block.labels" -}}
{{ include "block.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "block.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{/* Flags from a map: switches are --name or --no-name, lists repeat the flag. */}}
{{- define "block.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary (printf "--%s" $name) (printf "--no-%s" $name) $value }}
{{- else }}
{{- range (kindIs "slice" $value | ternary $value (list $value)) }}
- {{ printf "--%s=%s" $name (include "block.text" .) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A value as a text: Helm reads whole numbers as floating-point ones, which it writes as 1e+06 from a million on. */}}
{{- define "block.text" -}}
{{- if not (kindIs "float64" .) -}}{{ . }}{{- else if eq (floor .) . -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- define "block.selector" -}}
{{- $labels := list -}}
{{- range $name, $value := .Values.router.modelServers.matchLabels -}}
{{- $labels = append $labels (printf "%s=%s" $name $value) -}}
{{- end -}}
{{- join "," $labels -}}
{{- end -}}

{{/* Where instances come from: an InferencePool in mode gateway-api, labels and ports in the others. */}}
{{- define "block.instanceFlags" -}}
- --instances-from=kubernetes
- --pool-namespace={{ .Release.Namespace }}
- --pod-sidecar-port={{ .Values.router.modelServers.sidecarPort }}
{{- if eq .Values.mode "gateway-api" }}
- --pool-name={{ include "block.poolName" . }}
{{- else }}
- {{ printf "--endpoint-selector=%s" (include "block.selector" .) | quote }}
{{- range .Values.router.modelServers.targetPorts }}
- --endpoint-target-ports={{ .number }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What everything that decides has in common; call with (dict "root" . "policy" "block"). */}}
{{- define "block.decisionFlags" -}}
{{ include "block.instanceFlags" .root }}
- {{ printf "--policy=%s" .policy | quote }}
{{- if .root.Values.tagger.enabled }}
- --tagger={{ include "block.fullname" .root }}-tagger:{{ .root.Values.tagger.port }}
{{- end }}
{{- if .root.Values.provisioner.enabled }}
{{- range $number := until (int .root.Values.provisioner.replicas) }}
- --provisioner={{ include "block.fullname" $.root }}-provisioner-{{ $number }}.{{ include "block.fullname" $.root }}-provisioner:{{ $.root.Values.provisioner.port }}
{{- end }}
{{- end }}
{{- if .root.Values.objectives }}
- --objectives=/etc/block/config/objectives.toml
{{- end }}
{{- end -}}

{{- define "block.serverName" -}}
{{- default (printf "%s.%s.svc" (include "block.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* TLS by the Secret of tls.secretName; without it, parts listen in plain text, and have to say so. */}}
{{- define "block.linkFlags" -}}
{{- $root := .root -}}
{{- if $root.Values.tls.enabled -}}
{{- $own := and (eq .part "picker") (ne $root.Values.router.epp.certSecret "") -}}
- --tls-{{ ternary "client-cert" "cert" $own }}=/etc/block/tls/tls.crt
- --tls-{{ ternary "client-key" "key" $own }}=/etc/block/tls/tls.key
- --tls-ca=/etc/block/tls/ca.crt
{{- range default (list (include "block.serverName" $root)) $root.Values.tls.peers }}
- {{ printf "--tls-peer=%s" . | quote }}
{{- end }}
{{- else -}}
- --insecure
{{- end }}
{{- end -}}

{{/* Where probes find the health of a gRPC server: they have no TLS. */}}
{{- define "block.healthFlags" -}}
{{- if .root.Values.tls.enabled }}
- --health-port={{ .port }}
{{- end }}
{{- end -}}

{{- define "block.logFlags" -}}
- --log-level={{ .Values.logLevel }}
- --log-format={{ .Values.logFormat }}
{{- end -}}

{{/* The environment of each container; flags may have $(POD_NAME). */}}
{{- define "block.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The cache of compiled kernels has to be a folder that can be written, so it gets links to those of the image. */}}
{{- define "block.kernelsContainer" -}}
- name: kernels
  image: {{ include "block.image" (dict "image" .Values.image "tag" .Chart.AppVersion) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -rs, /opt/block/kernels/., /kernels]
  securityContext: {{ toYaml .Values.securityContext | nindent 4 }}
  resources: {requests: {cpu: 50m, memory: 32Mi}, limits: {memory: 256Mi}}
  volumeMounts:
    - {name: kernels, mountPath: /kernels}
{{- end -}}

{{- define "block.mounts" -}}
- {name: kernels, mountPath: /var/cache/block}
- {name: tmp, mountPath: /tmp}
{{- if .tls.enabled }}
- {name: tls, mountPath: /etc/block/tls, readOnly: true}
{{- end }}
{{- if .objectives }}
- {name: config, mountPath: /etc/block/config, readOnly: true}
{{- end }}
{{- end -}}

{{- define "block.volumes" -}}
- {name: kernels, emptyDir: {sizeLimit: 1Gi}}
- {name: tmp, emptyDir: {sizeLimit: 1Gi}}
{{- if .Values.tls.enabled }}
- {name: tls, secret: {secretName: {{ .Values.tls.secretName | quote }}}}
{{- end }}
{{- if .Values.objectives }}
- name: config
  configMap: {name: {{ include "block.fullname" . }}}
{{- end }}
{{- end -}}

{{/* What the specs of all parts' pods share; the dict is that of block.deployment. */}}
{{- define "block.podSpec" -}}
serviceAccountName: {{ include (ternary "block.provisionerAccountName" "block.serviceAccountName" (eq .part "provisioner")) .root }}
automountServiceAccountToken: {{ .token }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
securityContext: {{ toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
initContainers:
  {{- include "block.kernelsContainer" .root | nindent 2 }}
{{- end -}}

{{- define "block.grpcPorts" -}}
- {name: grpc, containerPort: {{ .values.port }}}
- {name: http-metrics, containerPort: {{ .values.metricsPort }}}
{{- if .root.Values.tls.enabled }}
- {name: grpc-health, containerPort: {{ .values.healthPort }}}
{{- end }}
{{- end -}}

{{/* Probes of a gRPC server: it lives while it replies, and is ready when its service says so. */}}
{{- define "block.grpcProbes" -}}
startupProbe:
  grpc: {port: {{ .port }}{{ with .live }}, service: {{ . }}{{ end }}}
  periodSeconds: 2
  failureThreshold: 300
livenessProbe:
  grpc: {port: {{ .port }}{{ with .live }}, service: {{ . }}{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  grpc: {port: {{ .port }}, service: {{ .ready }}}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end -}}

{{/* Annotations of a pod; a change of the configuration restarts it. */}}
{{- define "block.podAnnotations" -}}
{{- with .root.Values.objectives }}
checksum/config: {{ sha256sum . }}
{{- end }}
{{- with .values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}
