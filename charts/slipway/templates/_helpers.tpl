{{- /* Labels of every object. Call with (dict "root" $ "part" "operator"). */ -}}
{{- define "slipway.labels" -}}
{{ include "slipway.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/part-of: slipway
{{- /* Flux adds the digest of the chart to its version: 0.1.0+a81cf7c3432b. */}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* What selects the pods of a part; immutable, so nothing that changes may be in it. */ -}}
{{- define "slipway.selector" -}}
app.kubernetes.io/name: {{ .root.Values.name }}-{{ .part }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- /* An image with its registry, and its digest or its tag. Call with root and image. */ -}}
{{- define "slipway.image" -}}
{{- $global := .root.Values.global | default dict -}}
{{- with $global.imageRegistry | default .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- /* Pull secrets: those given, and those of a chart around this one. Call with root and own; returns YAML. */ -}}
{{- define "slipway.imagePullSecrets" -}}
{{- $all := list -}}
{{- range concat .own ((.root.Values.global | default dict).imagePullSecrets | default list) -}}
{{- $all = append $all (dict "name" (kindIs "string" . | ternary . (get (kindIs "map" . | ternary . dict) "name"))) -}}
{{- end -}}
{{- with uniq $all }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{- /* The defaults of the pods of services and pools, as the operator reads them. */ -}}
{{- define "slipway.replicaPlacement" -}}
{{- $secrets := list -}}
{{- range fromYamlArray (include "slipway.imagePullSecrets" (dict "root" $ "own" .Values.runtime.imagePullSecrets)) -}}
{{- $secrets = append $secrets .name -}}
{{- end -}}
{{- dict "image_pull_secrets" $secrets "node_selector" .Values.runtime.nodeSelector "tolerations" .Values.runtime.tolerations | toJson -}}
{{- end -}}

{{- /* Of gateway and operator, which passes it on to replicas: both choose the same traces. */ -}}
{{- define "slipway.tracingEnv" -}}
- name: SLIPWAY_OTLP_ENDPOINT
  value: {{ .otlpEndpoint | quote }}
- name: SLIPWAY_TRACE_RATIO
  value: {{ .ratio | quote }}
- name: SLIPWAY_TRACE_SLOW_SECONDS
  value: {{ printf "%.3f" (float64 .slowSeconds) | trimSuffix ".000" | quote }}
{{- end -}}

{{- define "slipway.masterSecret" -}}
{{ .Values.adminMaster.existingSecret | default (printf "%s-admin-master" .Values.name) }}
{{- end -}}

{{- define "slipway.gatewayKeySecret" -}}
{{ .Values.gatewayKey.existingSecret | default (printf "%s-gateway-key" .Values.name) }}
{{- end -}}

{{- /* The Secrets that the operator creates if they do not exist, each after a space. */ -}}
{{- define "slipway.ownSecrets" -}}
{{- if not .Values.adminMaster.existingSecret }} {{ include "slipway.masterSecret" . }}{{ end -}}
{{- if not .Values.gatewayKey.existingSecret }} {{ include "slipway.gatewayKeySecret" . }}{{ end -}}
{{- end -}}

{{- define "slipway.gatewayURL" -}}
{{- $scheme := ternary "https" "http" (ne .Values.gateway.tls.secretName "") -}}
{{- $inside := printf "%s://%s-gateway.%s.svc.%s:%d" $scheme .Values.name .Release.Namespace .Values.clusterDomain (int64 .Values.gateway.service.port) -}}
{{ .Values.gateway.url | default $inside }}
{{- end -}}

{{- define "slipway.directAccess" -}}
{{ .Values.routing.directAccessDefault | default (ternary "GatewayOnly" "Open" (ne .Values.gateway.tenants.configMap "")) }}
{{- end -}}

{{- define "slipway.podSecurityContext" -}}
runAsNonRoot: true
{{- if not .root.Values.podSecurity.assignedByPlatform }}
runAsUser: {{ .root.Values.podSecurity.user | int64 }}
runAsGroup: {{ .root.Values.podSecurity.group | int64 }}
fsGroup: {{ .root.Values.podSecurity.group | int64 }}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "slipway.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- /* What the pods of both parts have in common besides their container. */ -}}
{{- define "slipway.podSpec" -}}
{{- $part := index .root.Values .part -}}
serviceAccountName: {{ .root.Values.name }}-{{ .part }}
automountServiceAccountToken: true
enableServiceLinks: false
securityContext:
  {{- include "slipway.podSecurityContext" . | nindent 2 }}
{{- with include "slipway.imagePullSecrets" (dict "root" .root "own" .root.Values.imagePullSecrets) }}
imagePullSecrets:
  {{- . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  {{- if $part.topologySpreadConstraints }}
  {{- toYaml $part.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "slipway.selector" . | nindent 8 }}
  {{- end }}
volumes:
  {{- with $part.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if eq .part "operator" }}
  - name: admin-master
    secret:
      secretName: {{ include "slipway.masterSecret" .root }}
      defaultMode: 0440
      {{- if not .root.Values.adminMaster.existingSecret }}
      optional: true  # the init container creates it
      {{- end }}
  {{- end }}
  {{- if eq .part "gateway" }}
  {{- if .root.Values.gateway.snapshot.enabled }}
  # It outlives the container, not the pod. Two files of at most 64 MiB.
  - name: state
    emptyDir:
      sizeLimit: 160Mi
  {{- end }}
  {{- with .root.Values.gateway.tenants.configMap }}
  - name: tenants
    configMap:
      name: {{ . }}
  {{- end }}
  {{- with .root.Values.gateway.tenants.keysSecret }}
  - name: api-keys
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
  {{- with .root.Values.gateway.batch.existingClaim }}
  - name: batches
    persistentVolumeClaim:
      claimName: {{ . }}
  {{- end }}
  # The authorities of internal TLS, made by the operator. Also while it is off: replicas of before are still verified.
  - name: internal-ca
    configMap:
      name: {{ .root.Values.name }}-internal-ca
      optional: true
  {{- if .root.Values.internalTLS.enabled }}
  - name: internal-tls
    secret:
      secretName: {{ .root.Values.name }}-gateway-internal-tls
      defaultMode: 0440
  {{- end }}
  {{- with .root.Values.gateway.tls.secretName }}
  - name: tls
    secret:
      secretName: {{ . }}
      defaultMode: 0440
  {{- end }}
  {{- end }}
  - name: gateway-key
    secret:
      secretName: {{ include "slipway.gatewayKeySecret" .root }}
      defaultMode: 0440
      {{- if and (eq .part "operator") (not .root.Values.gatewayKey.existingSecret) }}
      optional: true  # the init container creates it; a gateway waits for it
      {{- end }}
  - name: tmp
    emptyDir: {medium: Memory, sizeLimit: 64Mi}
  {{- if and (eq .part "operator") .root.Values.engines.install }}
  - name: engines
    configMap:
      name: {{ .root.Values.name }}-engines
  {{- end }}
{{- end -}}

{{- define "slipway.commonEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: SLIPWAY_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: SLIPWAY_GATEWAY_KEY_DIR
  value: /etc/slipway/gateway
- name: SLIPWAY_WATCH_NAMESPACES
  value: {{ join "," .root.Values.watchNamespaces | quote }}
- name: SLIPWAY_LOG_LEVEL
  value: {{ (index .root.Values .part).logLevel }}
{{- end -}}

{{- /* Variables of a part, with those of extraEnv in place of its own of the same name: a list with a name twice is
       refused by server-side apply. Call with own (YAML) and extra (list). */ -}}
{{- define "slipway.mergedEnv" -}}
{{- $replaced := dict -}}
{{- range .extra }}{{ $_ := set $replaced .name true }}{{ end -}}
{{- $all := list -}}
{{- range fromYamlArray .own }}{{ if not (hasKey $replaced .name) }}{{ $all = append $all . }}{{ end }}{{ end -}}
{{- toYaml (concat $all .extra) -}}
{{- end -}}

{{- define "slipway.commonMounts" -}}
- {name: gateway-key, mountPath: /etc/slipway/gateway, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{- /* One set of rules, as a ClusterRole, or as a Role in each watched namespace. Call with root, part and rules. */ -}}
{{- define "slipway.grant" -}}
{{- $name := printf "%s-%s" .root.Values.name .part -}}
{{- $call := . -}}
{{- if .root.Values.watchNamespaces }}
{{- range .root.Values.watchNamespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels:
    {{- include "slipway.labels" $call | nindent 4 }}
rules:
  {{- $call.rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ . }}
  labels:
    {{- include "slipway.labels" $call | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $call.root.Release.Namespace }}}
{{- end }}
{{- else }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels:
    {{- include "slipway.labels" $call | nindent 4 }}
rules:
  {{- $call.rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels:
    {{- include "slipway.labels" $call | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
{{- end -}}

{{- define "slipway.operatorRules" -}}
- apiGroups: [slipway.dev]
  resources: [inferenceservices, loraadapters]
  verbs: [get, list, watch, patch]  # patch: only the finalizer
- apiGroups: [slipway.dev]
  resources: [warmpools]
  verbs: [get, list, watch]
- apiGroups: [slipway.dev]
  resources: [inferenceservices/status, loraadapters/status, warmpools/status]
  verbs: [patch]
- apiGroups: [slipway.dev]
  resources: [inferenceservices/finalizers, warmpools/finalizers]
  verbs: [update]  # to own the pods with blockOwnerDeletion
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
{{- if eq .Values.operator.replicaAccess "proxy" }}
- apiGroups: [""]
  resources: [pods/proxy]
  verbs: [get, create, delete]  # delete: to unload adapters
{{- end }}
# Children. get: to leave alone what the operator did not make. delete: the API server asks for it before an owner may
# change, which happens when a service is deleted and applied again before its old children are collected. list: a new
# leader compares all of them together. watch: what other clients edit or delete is restored within seconds.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, patch, delete]  # what each revision's pods are built from
{{- if .Values.internalTLS.enabled }}
# The certificate of each namespace. A create cannot be limited to names, and reads and changes nothing.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [slipway-internal-tls]
  verbs: [get, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch, list]  # list: the kubelet names a volume that it cannot mount only there
{{- end -}}

{{- /* Three watches and nothing else. Rights know no labels, so the watch of replicas is a right to read all pods of the
       namespaces that are served; watchNamespaces narrows it. */ -}}
{{- define "slipway.gatewayRules" -}}
{{- if not .Values.watchNamespaces }}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]  # a name NAMESPACE/NAME is answered by that namespace alone, also before it has an object
{{- end }}
- apiGroups: [slipway.dev]
  resources: [inferenceservices, loraadapters]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end -}}
