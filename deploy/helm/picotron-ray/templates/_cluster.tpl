{{- /* Made by deploy/helm/make_chart.py: do not edit. */ -}}
{{- define "picotron-ray.cluster" -}}
authOptions:
  mode: token
autoscalerOptions:
  idleTimeoutSeconds: 300
  resources:
    limits:
      cpu: 500m
      memory: 1Gi
    requests:
      cpu: 500m
      memory: 1Gi
  securityContext:
    allowPrivilegeEscalation: false
    capabilities:
      drop:
      - ALL
    readOnlyRootFilesystem: true
  version: v2
  volumeMounts:
  - mountPath: /tmp
    name: tmp
enableInTreeAutoscaling: true
{{- with .Values.gcsFaultToleranceOptions }}
gcsFaultToleranceOptions: {{ toJson . }}
{{- end }}
headGroupSpec:
  rayStartParams:
    num-cpus: '0'
    object-store-memory: '134217728'
  template:
    metadata:
      annotations:
        cluster-autoscaler.kubernetes.io/safe-to-evict: 'false'
        karpenter.sh/do-not-disrupt: 'true'
      labels:
        app.kubernetes.io/part-of: picotron-ray
    spec:
      automountServiceAccountToken: true
      containers:
      - env:
        - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
          value: '60'
        - name: RAY_USAGE_STATS_ENABLED
          value: '0'
        - name: RAY_worker_niceness
          value: '0'
        envFrom:
        - secretRef:
            name: picotron-s3
            optional: true
        image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | toJson }}
        imagePullPolicy: IfNotPresent
        name: ray-head
        ports:
        - containerPort: 6379
          name: gcs-server
        - containerPort: 8265
          name: dashboard
        - containerPort: 9400
          name: train-metrics
        resources:
          limits: {{ toJson .Values.head.resources }}
          requests: {{ toJson .Values.head.resources }}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities:
            drop:
            - ALL
          readOnlyRootFilesystem: true
        volumeMounts:
        - mountPath: /dev/shm
          name: shm
        - mountPath: /tmp
          name: tmp
        - mountPath: /home/picotron
          name: home
        - mountPath: /etc/picotron
          name: job
          readOnly: true
      restartPolicy: Never
      securityContext:
        fsGroup: 1000
        runAsGroup: 1000
        runAsNonRoot: true
        runAsUser: 1000
        seccompProfile:
          type: RuntimeDefault
      serviceAccountName: {{ .Release.Name }}
      terminationGracePeriodSeconds: 120
      volumes:
      - emptyDir:
          medium: Memory
          sizeLimit: {{ toJson .Values.head.shm }}
        name: shm
      - emptyDir:
          sizeLimit: 10Gi
        name: tmp
      - emptyDir:
          sizeLimit: 10Gi
        name: home
      - configMap:
          name: {{ .Release.Name }}-job
        name: job
rayVersion: 2.60.0
workerGroupSpecs:
- groupName: workers
  maxReplicas: {{ toJson .Values.workers.maxReplicas }}
  minReplicas: {{ toJson .Values.workers.minReplicas }}
  rayStartParams:
    object-store-memory: '134217728'
  replicas: {{ toJson .Values.workers.replicas }}
  template:
    metadata:
      labels:
        app.kubernetes.io/part-of: picotron-ray
    spec:
      automountServiceAccountToken: false
      containers:
      - env:
        - name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
          value: {{ toJson .Values.workers.drainSeconds }}
        - name: RAY_USAGE_STATS_ENABLED
          value: '0'
        - name: RAY_worker_niceness
          value: '0'
        envFrom:
        - secretRef:
            name: picotron-s3
            optional: true
        image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | toJson }}
        imagePullPolicy: IfNotPresent
        name: ray-worker
        ports:
        - containerPort: 9400
          name: train-metrics
        resources:
          limits: {{ toJson .Values.workers.resources }}
          requests: {{ toJson .Values.workers.resources }}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities:
            drop:
            - ALL
          readOnlyRootFilesystem: true
        volumeMounts:
        - mountPath: /dev/shm
          name: shm
        - mountPath: /tmp
          name: tmp
        - mountPath: /home/picotron
          name: home
{{- with .Values.workers.nodeSelector }}
      nodeSelector: {{ toJson . }}
{{- end }}
      restartPolicy: Never
      securityContext:
        fsGroup: 1000
        runAsGroup: 1000
        runAsNonRoot: true
        runAsUser: 1000
        seccompProfile:
          type: RuntimeDefault
      serviceAccountName: {{ .Release.Name }}
      terminationGracePeriodSeconds: {{ toJson .Values.workers.graceSeconds }}
{{- with .Values.workers.tolerations }}
      tolerations: {{ toJson . }}
{{- end }}
      volumes:
      - emptyDir:
          medium: Memory
          sizeLimit: {{ toJson .Values.workers.shm }}
        name: shm
      - emptyDir:
          sizeLimit: 10Gi
        name: tmp
      - emptyDir:
          sizeLimit: 10Gi
        name: home
{{- end }}
