{{/* Names, labels, and the pod of both workload kinds. */}}

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

{{/* Listeners for these ports. */}}
{{- define "turnpike.listen" -}}
{{- $families := .families -}}
{{- $all := list -}}
{{- range $port := .ports }}
{{- range $families }}
{{- $all = append $all (printf "%s:%d" (eq . "IPv6" | ternary "[::]" "0.0.0.0") (int $port)) }}
{{- end }}
{{- end }}
{{- join "," $all }}
{{- end }}

{{/* All client ports: public `port`, and `target` on the pod. The load balancer has its own targets: a Service rewrites the destination to the
node's address, and clients that come through it must be distinguishable from direct ones. */}}
{{- define "turnpike.clientPorts" -}}
{{- $root := . }}
{{- $all := list }}
{{- $ways := list (dict "name" "" "ports" .Values.ports "balanced" false) }}
{{- if .Values.loadBalancer.enabled }}
{{- $ways = append $ways (dict "name" "-balanced" "ports" .Values.loadBalancer.ports "balanced" true) }}
{{- end }}
{{- range $way := $ways }}
{{- $plain := dict "port" (int $root.Values.ports.turn) "target" (int $way.ports.turn) "balanced" $way.balanced }}
{{- $secure := dict "port" (int $root.Values.ports.tls) "target" (int $way.ports.tls) "balanced" $way.balanced }}
{{- $all = append $all (merge (dict "name" (printf "turn-udp%s" $way.name) "protocol" "UDP") $plain) }}
{{- $all = append $all (merge (dict "name" (printf "turn-tcp%s" $way.name) "protocol" "TCP") $plain) }}
{{- if $root.Values.tls.secretName }}
{{- $all = append $all (merge (dict "name" (printf "turns-tcp%s" $way.name) "protocol" "TCP") $secure) }}
{{- if $root.Values.tls.dtls }}
{{- $all = append $all (merge (dict "name" (printf "turns-udp%s" $way.name) "protocol" "UDP") $secure) }}
{{- end }}
{{- end }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{/* Ports on the pod for `turn` or `tls`. */}}
{{- define "turnpike.targets" -}}
{{- $all := list (index .root.Values.ports .for) }}
{{- if .root.Values.loadBalancer.enabled }}
{{- $all = append $all (index .root.Values.loadBalancer.ports .for) }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{- define "turnpike.authSecret" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.existingSecret }}
{{- else if or .Values.auth.secrets .Values.auth.users }}{{ include "turnpike.fullname" . }}-auth
{{- end }}
{{- end }}

{{- define "turnpike.fleetSecret" -}}
{{- default (printf "%s-fleet" (include "turnpike.fullname" .)) .Values.fleet.existingSecret }}
{{- end }}

{{/* Non-empty if the server reads the Node object of its node. */}}
{{- define "turnpike.asksForNode" -}}
{{- if has .Values.publicAddress.from (list "node" "annotation") }}true{{ end }}
{{- end }}

{{/* Capabilities of the server: a list, as JSON. */}}
{{- define "turnpike.capabilities" -}}
{{- $all := list }}
{{- /* Host networking already needs a privileged namespace; pods fall back to user space. */}}
{{- if or (has .Values.datapath (list "kernel" "xdp")) (and (eq .Values.datapath "auto") (eq .Values.network "host")) }}
{{- $all = concat $all (list "NET_ADMIN" "BPF" "PERFMON") }}
{{- end }}
{{- if or (lt (int .Values.ports.turn) 1024) (and .Values.tls.secretName (lt (int .Values.ports.tls) 1024)) }}
{{- $all = append $all "NET_BIND_SERVICE" }}
{{- end }}
{{- toJson $all }}
{{- end }}

{{/* Rejects variables that the chart sets: Kubernetes would refuse duplicates, or the last one would win. */}}
{{- define "turnpike.checkEnv" -}}
{{- range $name, $_ := .Values.env }}
{{- range list "SERVER_LISTEN" "SERVER_REALM" "SERVER_DATAPATH" "RELAY_PORTS" "RELAY_ADDRESSES" "AUTH_SECRETS" "AUTH_USERS" "TLS_LISTEN" "TLS_CERT" "TLS_KEY" "DTLS_LISTEN" "FLEET_URL" "FLEET_SECRET" "FLEET_NAME" "FLEET_NODE" "FLEET_REDIRECT" "FLEET_ZONE" "FLEET_BALANCER_PORTS" "STORE_URL" "STORE_STATE" "ADMIN" "ADMIN_LISTEN" "ADMIN_TLS_CERT" "ADMIN_TLS_KEY" "ADMIN_READ_TOKENS" "SHUTDOWN_DEADLINE" "LOG_LEVEL" "LOG_FORMAT" }}
{{- if or (eq $name (printf "TURNPIKE_%s" .)) (eq $name (printf "TURNPIKE_%s_FILE" .)) }}
{{- fail (printf "env: the chart sets %s itself" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* First and last relay port. */}}
{{- define "turnpike.checkPorts" -}}
{{- $ends := splitList "-" .Values.relayPorts }}
{{- $first := int (index $ends 0) }}
{{- $last := int (index $ends 1) }}
{{- if or (lt $first 1) (gt $last 65535) (le $last $first) }}
{{- fail (printf "relayPorts: %q is not a range of at least two ports between 1 and 65535" .Values.relayPorts) }}
{{- end }}
{{- if and (eq .Values.network "nodePort") (gt (sub $last $first) 499) }}
{{- fail (printf "relayPorts: %q has more than 500 ports, and each would be a port of a Service; use network: host" .Values.relayPorts) }}
{{- end }}
{{- end }}

{{- define "turnpike.pod" -}}
{{- include "turnpike.checkPorts" . }}
{{- include "turnpike.checkEnv" . }}
{{- $authSecret := include "turnpike.authSecret" . }}
{{- $own := empty .Values.auth.existingSecret }}
{{- $secretsKey := $own | ternary (empty .Values.auth.secrets | ternary "" "secrets") .Values.auth.secretsKey }}
{{- $usersKey := $own | ternary (empty .Values.auth.users | ternary "" "users") .Values.auth.usersKey }}
{{- $tlsPorts := include "turnpike.targets" (dict "root" . "for" "tls") | fromJsonArray }}
{{- $asksForNode := eq (include "turnpike.asksForNode" .) "true" -}}
metadata:
  labels:
    {{- include "turnpike.selector" . | nindent 4 }}
    {{- with .Values.commonLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration replaces the pod, so that settings that need a restart take effect.
    checksum/config: {{ include (print .Template.BasePath "/configmap.yaml") . | sha256sum }}
    checksum/secrets: {{ include (print .Template.BasePath "/secrets.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "turnpike.fullname" . }}
  # The server is reachable from outside, so it gets no token; the init container has one in a volume.
  automountServiceAccountToken: false
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
  # Time for the preStop hook, plus a margin.
  terminationGracePeriodSeconds: {{ add (int .Values.drain.deadline) 20 }}
  securityContext:
    fsGroup: 65532
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
        {{- include "turnpike.securityContext" (dict "capabilities" (list) "datapath" "") | nindent 8 }}
      volumeMounts:
        - name: run
          mountPath: /run/turnpike
        {{- if $asksForNode }}
        - name: account
          mountPath: /var/run/secrets/kubernetes.io/serviceaccount
          readOnly: true
        {{- end }}
  {{- end }}
  containers:
    - name: turnpike
      image: {{ include "turnpike.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, -c, /etc/turnpike/turnpike.toml]
      env:
        - name: RUNTIME_DIRECTORY
          value: /run/turnpike
        # Commands in this pod use its socket, because on the host network another server could answer on loopback.
        - name: TURNPIKE_ADMIN
          value: unix:/run/turnpike/turnpike.sock
        - name: TURNPIKE_SERVER_LISTEN
          value: {{ include "turnpike.listen" (dict "ports" (include "turnpike.targets" (dict "root" . "for" "turn") | fromJsonArray) "families" .Values.families) | quote }}
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
        {{- with $secretsKey }}
        - name: TURNPIKE_AUTH_SECRETS_FILE
          value: /run/secrets/turnpike/auth/{{ . }}
        {{- end }}
        {{- with $usersKey }}
        - name: TURNPIKE_AUTH_USERS_FILE
          value: /run/secrets/turnpike/auth/{{ . }}
        {{- end }}
        {{- if .Values.tls.secretName }}
        - name: TURNPIKE_TLS_LISTEN
          value: {{ include "turnpike.listen" (dict "ports" $tlsPorts "families" .Values.families) | quote }}
        - name: TURNPIKE_TLS_CERT
          value: /etc/turnpike/tls/tls.crt
        - name: TURNPIKE_TLS_KEY
          value: /etc/turnpike/tls/tls.key
        {{- if .Values.tls.dtls }}
        - name: TURNPIKE_DTLS_LISTEN
          value: {{ include "turnpike.listen" (dict "ports" $tlsPorts "families" .Values.families) | quote }}
        {{- end }}
        {{- end }}
        {{- if .Values.fleet.enabled }}
        - name: TURNPIKE_FLEET_URL_FILE
          value: /run/secrets/turnpike/fleet/url
        - name: TURNPIKE_FLEET_SECRET_FILE
          value: /run/secrets/turnpike/fleet/secret
        - name: TURNPIKE_FLEET_NAME
          value: {{ .Values.fleet.name }}
        # Stable across pod restarts, so that CONNECTION-IDs and tickets stay valid.
        - name: TURNPIKE_FLEET_NODE
          valueFrom:
            fieldRef:
              fieldPath: {{ eq .Values.kind "DaemonSet" | ternary "spec.nodeName" "metadata.name" }}
        - name: TURNPIKE_FLEET_REDIRECT
          value: {{ .Values.fleet.redirect }}
        {{- if .Values.loadBalancer.enabled }}
        - name: TURNPIKE_FLEET_BALANCER_PORTS
          value: {{ printf "%d,%d" (int .Values.loadBalancer.ports.turn) (int .Values.loadBalancer.ports.tls) | quote }}
        {{- end }}
        {{- if .Values.fleet.zone }}
        - name: TURNPIKE_FLEET_ZONE
          value: {{ .Values.fleet.zone | quote }}
        {{- else if .Values.publicAddress.from }}
        - name: TURNPIKE_FLEET_ZONE_FILE
          value: /run/turnpike/place/zone
        {{- else }}
        # Since Kubernetes 1.35, pods inherit this label from their node.
        - name: TURNPIKE_FLEET_ZONE
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['topology.kubernetes.io/zone']
        {{- end }}
        {{- end }}
        {{- if .Values.store.existingSecret }}
        - name: TURNPIKE_STORE_URL_FILE
          value: /run/secrets/turnpike/store/{{ .Values.store.key }}
        {{- end }}
        - name: TURNPIKE_STORE_STATE
          value: "off"
        - name: TURNPIKE_ADMIN_LISTEN
          value: {{ .Values.metrics.enabled | ternary (printf "unix:/run/turnpike/turnpike.sock,%s" (include "turnpike.listen" (dict "ports" (list .Values.metrics.port) "families" .Values.families))) "unix:/run/turnpike/turnpike.sock" | quote }}
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
        {{- range include "turnpike.clientPorts" . | fromJsonArray }}
        - name: {{ .name | replace "-balanced" "-lb" }}
          containerPort: {{ int .target }}
          protocol: {{ .protocol }}
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
            # Refuses new clients; returns once the last allocation has ended, or at the deadline.
            command: [/turnpike, drain, --deadline, {{ int .Values.drain.deadline | quote }}, --wait]
      securityContext:
        {{- $capabilities := include "turnpike.capabilities" . | fromJsonArray }}
        {{- include "turnpike.securityContext" (dict "capabilities" $capabilities "datapath" .Values.datapath) | nindent 8 }}
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
        {{- if .Values.store.existingSecret }}
        - name: store
          mountPath: /run/secrets/turnpike/store
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
    {{- if $asksForNode }}
    # The same contents as Kubernetes' automatic mount of the service account token.
    - name: account
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken:
              path: token
              expirationSeconds: 3600
          - configMap:
              name: kube-root-ca.crt
              items:
                - key: ca.crt
                  path: ca.crt
    {{- end }}
    {{- with $authSecret }}
    - name: auth
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with .Values.store.existingSecret }}
    - name: store
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
  {{- $affinity := deepCopy .Values.affinity }}
  {{- if and (eq .Values.kind "StatefulSet") (not (hasKey $affinity "podAntiAffinity")) }}
  {{- /* Two servers on one node would use the same ports. */}}
  {{- $same := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "turnpike.selector" . | fromYaml)) }}
  {{- $_ := set $affinity "podAntiAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $same)) }}
  {{- end }}
  {{- with $affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Security context for `capabilities`. Kubernetes grants capabilities only to root, which gets no others here. */}}
{{- define "turnpike.securityContext" -}}
{{- $unusual := not (empty .capabilities) -}}
runAsNonRoot: {{ not $unusual }}
runAsUser: {{ $unusual | ternary 0 65532 }}
runAsGroup: 65532
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
seccompProfile:
  {{- /* The default profile of older container runtimes blocks bpf(2) in spite of CAP_BPF; `auto` then stays in user space. */}}
  type: {{ has .datapath (list "kernel" "xdp") | ternary "Unconfined" "RuntimeDefault" }}
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
