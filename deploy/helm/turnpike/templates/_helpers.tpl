{{/* Names, labels, and the pod that both kinds of workload have. */}}

{{- define "turnpike.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "turnpike.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := include "turnpike.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "turnpike.selector" -}}
app.kubernetes.io/name: {{ include "turnpike.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "turnpike.labels" -}}
{{ include "turnpike.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "turnpike.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{/* Where the server listens on a port. */}}
{{- define "turnpike.listen" -}}
{{- $port := int .port -}}
{{- $all := list -}}
{{- range .families }}
{{- $all = append $all (printf "%s:%d" (eq . "IPv6" | ternary "[::]" "0.0.0.0") $port) }}
{{- end }}
{{- join "," $all }}
{{- end }}

{{- define "turnpike.authSecret" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.existingSecret }}
{{- else if or .Values.auth.secrets .Values.auth.users }}{{ include "turnpike.fullname" . }}-auth
{{- end }}
{{- end }}

{{- define "turnpike.fleetSecret" -}}
{{- default (printf "%s-fleet" (include "turnpike.fullname" .)) .Values.fleet.existingSecret }}
{{- end }}

{{/* Whether a server asks for the Node object that it runs on. */}}
{{- define "turnpike.asksForNode" -}}
{{- if has .Values.publicAddress.from (list "node" "annotation") }}true{{ end }}
{{- end }}

{{/* Whether the kernel is to relay, which needs a user who may have capabilities. */}}
{{- define "turnpike.usesKernel" -}}
{{- if has .Values.datapath (list "kernel" "xdp") }}true{{ end }}
{{- end }}

{{/* First and last relay port. */}}
{{- define "turnpike.checkPorts" -}}
{{- $ends := splitList "-" .Values.relayPorts }}
{{- $first := int (index $ends 0) }}
{{- $last := int (index $ends 1) }}
{{- if or (lt $first 1) (gt $last 65535) (le $last $first) }}
{{- fail (printf "relayPorts: %q is no range of two ports or more between 1 and 65535" .Values.relayPorts) }}
{{- end }}
{{- if and (eq .Values.network "nodePort") (gt (sub $last $first) 499) }}
{{- fail (printf "relayPorts: %q has more than 500 ports, each of which would be a port of a Service; use network: host" .Values.relayPorts) }}
{{- end }}
{{- end }}

{{- define "turnpike.pod" -}}
{{- include "turnpike.checkPorts" . }}
{{- $values := .Values }}
{{- $authSecret := include "turnpike.authSecret" . }}
metadata:
  labels:
    {{- include "turnpike.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Another configuration is another pod: what a reload cannot change is then in force too.
    checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
    checksum/secrets: {{ include (print .Template.BasePath "/secrets.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "turnpike.fullname" . }}
  automountServiceAccountToken: {{ eq (include "turnpike.asksForNode" .) "true" }}
  enableServiceLinks: false
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if eq .Values.network "host" }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  # The hook below, and a moment to say goodbye.
  terminationGracePeriodSeconds: {{ add (int .Values.drain.deadline) 20 }}
  securityContext:
    fsGroup: 65532
    seccompProfile:
      {{- if include "turnpike.usesKernel" . }}
      # The usual one refuses bpf(2).
      type: Unconfined
      {{- else }}
      type: RuntimeDefault
      {{- end }}
  {{- if .Values.publicAddress.from }}
  initContainers:
    - name: public-address
      image: {{ include "turnpike.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - public-address
        - --from
        - {{ eq .Values.publicAddress.from "annotation" | ternary (printf "annotation:%s" .Values.publicAddress.annotation) .Values.publicAddress.from | quote }}
        - --out
        - /run/turnpike/place
      env:
        - name: NODE_NAME
          valueFrom:
            fieldRef:
              fieldPath: spec.nodeName
      securityContext:
        {{- include "turnpike.container" (dict "root" . "capabilities" (list)) | nindent 8 }}
      volumeMounts:
        - name: run
          mountPath: /run/turnpike
  {{- end }}
  containers:
    - name: turnpike
      image: {{ include "turnpike.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, -c, /etc/turnpike/turnpike.toml]
      env:
        - name: RUNTIME_DIRECTORY
          value: /run/turnpike
        - name: TURNPIKE_SERVER_LISTEN
          value: {{ include "turnpike.listen" (dict "port" .Values.ports.turn "families" .Values.families) | quote }}
        - name: TURNPIKE_SERVER_REALM
          value: {{ .Values.realm | quote }}
        - name: TURNPIKE_SERVER_DATAPATH
          value: {{ .Values.datapath }}
        - name: TURNPIKE_RELAY_PORTS
          value: {{ .Values.relayPorts | quote }}
        {{- if .Values.publicAddress.from }}
        - name: TURNPIKE_RELAY_ADDRESSES_FILE
          value: /run/turnpike/place/relay-addresses
        {{- end }}
        {{- if and $authSecret (or .Values.auth.secrets (and .Values.auth.existingSecret .Values.auth.secretsKey)) }}
        - name: TURNPIKE_AUTH_SECRETS_FILE
          value: /run/secrets/turnpike/auth/{{ default "secrets" .Values.auth.secretsKey }}
        {{- end }}
        {{- if and $authSecret (or .Values.auth.users (and .Values.auth.existingSecret .Values.auth.usersKey)) }}
        - name: TURNPIKE_AUTH_USERS_FILE
          value: /run/secrets/turnpike/auth/{{ default "users" .Values.auth.usersKey }}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - name: TURNPIKE_TLS_LISTEN
          value: {{ include "turnpike.listen" (dict "port" .Values.ports.tls "families" .Values.families) | quote }}
        - name: TURNPIKE_TLS_CERT
          value: /etc/turnpike/tls/tls.crt
        - name: TURNPIKE_TLS_KEY
          value: /etc/turnpike/tls/tls.key
        {{- if .Values.tls.dtls }}
        - name: TURNPIKE_DTLS_LISTEN
          value: {{ include "turnpike.listen" (dict "port" .Values.ports.tls "families" .Values.families) | quote }}
        {{- end }}
        {{- end }}
        {{- if .Values.fleet.enabled }}
        - name: TURNPIKE_FLEET_URL_FILE
          value: /run/secrets/turnpike/fleet/url
        - name: TURNPIKE_FLEET_SECRET_FILE
          value: /run/secrets/turnpike/fleet/secret
        - name: TURNPIKE_FLEET_NAME
          value: {{ .Values.fleet.name }}
        # The same for each pod of a place, so that CONNECTION-IDs and tickets keep their numbers.
        - name: TURNPIKE_FLEET_NODE
          valueFrom:
            fieldRef:
              fieldPath: {{ eq .Values.kind "DaemonSet" | ternary "spec.nodeName" "metadata.name" }}
        - name: TURNPIKE_FLEET_REDIRECT
          value: {{ .Values.fleet.redirect }}
        {{- if .Values.fleet.zone }}
        - name: TURNPIKE_FLEET_ZONE
          value: {{ .Values.fleet.zone | quote }}
        {{- else if include "turnpike.asksForNode" . }}
        - name: TURNPIKE_FLEET_ZONE_FILE
          value: /run/turnpike/place/zone
        {{- else }}
        # Since Kubernetes 1.35 pods have this label of their node.
        - name: TURNPIKE_FLEET_ZONE
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['topology.kubernetes.io/zone']
        {{- end }}
        {{- end }}
        - name: TURNPIKE_STORE_STATE
          value: "off"
        - name: TURNPIKE_ADMIN_LISTEN
          value: {{ .Values.metrics.enabled | ternary (printf "unix:/run/turnpike/turnpike.sock,%s" (include "turnpike.listen" (dict "port" .Values.metrics.port "families" .Values.families))) "unix:/run/turnpike/turnpike.sock" | quote }}
        {{- if .Values.metrics.enabled }}
        - name: TURNPIKE_ADMIN_TLS_CERT
          value: /etc/turnpike/metrics/tls.crt
        - name: TURNPIKE_ADMIN_TLS_KEY
          value: /etc/turnpike/metrics/tls.key
        - name: TURNPIKE_ADMIN_READ_TOKENS_FILE
          value: /run/secrets/turnpike/metrics/token
        {{- end }}
        - name: TURNPIKE_SHUTDOWN_DEADLINE
          value: {{ int .Values.drain.deadline | quote }}
        - name: TURNPIKE_LOG_LEVEL
          value: {{ .Values.log.level | quote }}
        - name: TURNPIKE_LOG_FORMAT
          value: {{ .Values.log.format }}
        {{- range $name, $value := .Values.env }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
      ports:
        - name: turn-udp
          containerPort: {{ int .Values.ports.turn }}
          protocol: UDP
        - name: turn-tcp
          containerPort: {{ int .Values.ports.turn }}
          protocol: TCP
        {{- if .Values.tls.secretName }}
        - name: turns-tcp
          containerPort: {{ int .Values.ports.tls }}
          protocol: TCP
        {{- if .Values.tls.dtls }}
        - name: turns-udp
          containerPort: {{ int .Values.ports.tls }}
          protocol: UDP
        {{- end }}
        {{- end }}
        {{- if .Values.metrics.enabled }}
        - name: metrics
          containerPort: {{ int .Values.metrics.port }}
          protocol: TCP
        {{- end }}
      startupProbe:
        exec:
          command: [/turnpike, health, --live]
        periodSeconds: 1
        failureThreshold: 60
      livenessProbe:
        exec:
          command: [/turnpike, health, --live]
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        exec:
          command: [/turnpike, health]
        periodSeconds: 5
        timeoutSeconds: 3
      lifecycle:
        preStop:
          exec:
            # Nobody new; until the last session is gone, or its time is over.
            command: [/turnpike, drain, --deadline, {{ int .Values.drain.deadline | quote }}, --wait]
      securityContext:
        {{- include "turnpike.container" (dict "root" . "capabilities" (include "turnpike.usesKernel" . | empty | ternary (list) (list "NET_ADMIN" "BPF" "PERFMON"))) | nindent 8 }}
      {{- with .Values.resources }}
      resources:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/turnpike/turnpike.toml
          subPath: turnpike.toml
          readOnly: true
        - name: run
          mountPath: /run/turnpike
        {{- with $authSecret }}
        - name: auth
          mountPath: /run/secrets/turnpike/auth
          readOnly: true
        {{- end }}
        {{- if .Values.fleet.enabled }}
        - name: fleet
          mountPath: /run/secrets/turnpike/fleet
          readOnly: true
        {{- end }}
        {{- if .Values.tls.secretName }}
        - name: tls
          mountPath: /etc/turnpike/tls
          readOnly: true
        {{- end }}
        {{- if .Values.metrics.enabled }}
        - name: metrics-tls
          mountPath: /etc/turnpike/metrics
          readOnly: true
        - name: metrics-token
          mountPath: /run/secrets/turnpike/metrics
          readOnly: true
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "turnpike.fullname" . }}
    - name: run
      emptyDir:
        medium: Memory
        sizeLimit: 1Mi
    {{- with $authSecret }}
    - name: auth
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- if .Values.fleet.enabled }}
    - name: fleet
      secret:
        secretName: {{ include "turnpike.fleetSecret" . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.tls.secretName }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- if .Values.metrics.enabled }}
    - name: metrics-tls
      secret:
        secretName: {{ .Values.metrics.tlsSecretName }}
        defaultMode: 0440
    - name: metrics-token
      secret:
        secretName: {{ .Values.metrics.tokenSecretName }}
        defaultMode: 0440
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or .Values.affinity (eq .Values.kind "StatefulSet") }}
  affinity:
    {{- if .Values.affinity }}
    {{- toYaml .Values.affinity | nindent 4 }}
    {{- else }}
    # Two on one node would have the same ports.
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "turnpike.selector" . | nindent 14 }}
    {{- end }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "turnpike.container" -}}
{{- $asRoot := include "turnpike.usesKernel" .root -}}
runAsNonRoot: {{ empty $asRoot }}
runAsUser: {{ empty $asRoot | ternary 65532 0 }}
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
