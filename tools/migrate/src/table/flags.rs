//! The rows of the migration table for the endpoint picker's command-line flags and environment
//! variables.
//!
//! Sources: llm-d-router `pkg/epp/server/options.go` and
//! `pkg/common/observability/logging/options.go` of August 2026; the endpoint picker of the Gateway
//! API Inference Extension, v1.0 to v1.5.

use super::{MigrationRow, changed, kept, none};

const FIXED_PORT: &str = "the daemon's ports are fixed";
const NO_SPANS: &str = "spans have settings of their own here: tags of Envoy's span, or --otlp-endpoint of the daemon (docs/how-to/traces.md)";
const CHART_TLS: &str =
    "the chart makes the daemon's certificates, and the daemon reads them again when they change";
const ENGINE_METRIC: &str =
    "engineConfigs of core-metrics-extractor, or an engine that is known here";
const WHERE_METRICS: &str = "a parameter of metrics-data-source";
const LEARNED: &str =
    "latencies are learned in the daemon and predicted in the proxy; there are no servers for it";
const OLD_VARIABLE: &str = "write it as a parameter of the plugin in the configuration; newer llm-d versions ignore the variable too";

#[rustfmt::skip] // a table
pub const FLAGS: &[MigrationRow] = &[
    kept("--pool-name", "pools[].inferencePool.name", "the InferencePool"),
    kept("--pool-namespace", "pools[].namespace", "the namespace of the InferencePool"),
    kept("--pool-group", "pools[].inferencePool.apiVersion", "the API group of the InferencePool"),
    kept("--endpoint-selector", "pools[].modelServers.matchLabels", "becomes the selector of an InferencePool"),
    kept("--endpoint-target-ports", "pools[].modelServers.targetPorts", "become the target ports of an InferencePool"),
    kept("--config-file", "pools[].config", "the items of the file are listed one by one"),
    kept("--config-text", "pools[].config", "the items of the text are listed one by one"),
    changed("--grpc-port", "", "endpointPickerRef must name port 9002 of the picker's Service"),
    changed("--grpc-health-port", "", FIXED_PORT),
    changed("--metrics-port", "", "metrics are on port 9091 of daemons"),
    changed("--ha-enable-leader-election", "daemon.replicas", "daemons always elect a leader by a Lease; every proxy picks"),
    changed("--drain-timeout", "", "proxies go on picking while a daemon is replaced"),
    changed("--grpc-max-recv-msg-size", "daemon.extraArgs", "a request body may have 24 MiB (--ext-proc-body-limit-bytes)"),
    changed("--grpc-max-send-msg-size", "daemon.extraArgs", "a request body may have 24 MiB (--ext-proc-body-limit-bytes)"),
    none("--disable-endpoint-subset-filter", "the subset hint of the Endpoint Picker Protocol always applies").harmless(&["false"]),
    none("--emit-endpoint-scores", "scores are not in dynamic metadata; `switchpointd explain` and the decision log have them").harmless(&["false"]),
    changed("--refresh-metrics-interval", "daemon.scrapeIntervalBusy", "the daemon scrapes an endpoint with work every 100 ms, an idle one every second"),
    changed("--refresh-prometheus-metrics-interval", "", "metrics are current whenever Prometheus reads them"),
    changed("--metrics-staleness-threshold", "daemon.extraArgs", "metrics older than 5 s (--staleness-max) count as unknown, which means neither idle nor full"),
    changed("--total-queued-requests-metric", "pools[].config", ENGINE_METRIC),
    changed("--total-running-requests-metric", "pools[].config", ENGINE_METRIC),
    changed("--kv-cache-usage-percentage-metric", "pools[].config", ENGINE_METRIC),
    changed("--lora-info-metric", "pools[].config", ENGINE_METRIC),
    changed("--cache-info-metric", "pools[].config", ENGINE_METRIC),
    kept("--model-server-metrics-scheme", "pools[].config", WHERE_METRICS),
    kept("--model-server-metrics-path", "pools[].config", WHERE_METRICS),
    kept("--model-server-metrics-port", "pools[].config", WHERE_METRICS),
    changed("--model-server-metrics-https-insecure-skip-verify", "", "needs https; certificates are then checked unless the daemon has --endpoint-tls-insecure"),
    changed("--v", "daemon.logLevel", "the log has levels by name: info, or debug from 4 on"),
    changed("--zap-log-level", "daemon.logLevel", "the log has levels by name; the default is info"),
    kept("--zap-encoder", "daemon.logFormat", "json, or text for console"),
    changed("--zap-devel", "", "the daemon has one kind of log"),
    changed("--zap-stacktrace-level", "", "the log has no stack traces"),
    changed("--zap-time-encoding", "", "times are in RFC 3339"),
    none("--tracing", NO_SPANS).harmless(&["false"]),
    changed("--health-checking", "", "the daemon always serves gRPC health"),
    changed("--enable-pprof", "", "there are no profiles; /debug pages show the state"),
    changed("--secure-serving", "extProc", "the ext_proc port has TLS"),
    changed("--cert-path", "tls", CHART_TLS),
    changed("--enable-cert-reload", "tls", CHART_TLS),
    none("--tls-min-version", "TLS 1.2 and 1.3 are accepted, without a setting").harmless(&["VersionTLS10", "VersionTLS11", "VersionTLS12"]),
    none("--tls-cipher-suites", "rustls chooses the cipher suites; no setting"),
    changed("--metrics-endpoint-auth", "", "port 9091 serves metrics and nothing else; the NetworkPolicy decides who may scrape"),
    none("--metrics-client-ca-file", "the metrics port has no TLS; the NetworkPolicy decides who may scrape"),
    none("--metrics-cert-dir", "the metrics port has no TLS; the NetworkPolicy decides who may scrape"),
    changed("--enable-grpc-stream-metrics", "", "the daemon has series of its own for ext_proc streams"),
    kept("--enable-latency-predictor", "daemon.extraArgs", "--latency-prediction"),
    changed("--allow-experimental-plugins", "", "experimental plugins need no flag"),
];

/// The environment variables.
#[rustfmt::skip] // a table
pub const ENVIRONMENT: &[MigrationRow] = &[
    changed("$NAMESPACE", "", "the chart sets what the daemon needs"),
    changed("$POD_NAME", "", "the chart sets what the daemon needs"),
    changed("$POD_IP", "", "the chart sets what the daemon needs"),
    changed("$HF_TOKEN", "", "no tokenizer is loaded"),
    none("$OTEL_SERVICE_NAME", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_EXPORTER_OTLP_ENDPOINT", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_TRACES_EXPORTER", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_TRACES_SAMPLER", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_TRACES_SAMPLER_ARG", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_RESOURCE_ATTRIBUTES", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_RESOURCE_ATTRIBUTES_NODE_NAME", NO_SPANS).with("router.tracing.enabled"),
    none("$OTEL_RESOURCE_ATTRIBUTES_POD_NAME", NO_SPANS).with("router.tracing.enabled"),
    changed("$TRAINING_SERVER_URL", "daemon.extraArgs", LEARNED),
    changed("$PREDICTION_SERVER_URL", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_MAX_SAMPLE_SIZE", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_FLUSH_INTERVAL_SEC", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_USE_NATIVE_XGBOOST", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_HTTP_TIMEOUT_SEC", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_METRICS_INTERVAL_SEC", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_MAX_BULK_SIZE", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_COALESCE_WINDOW_MS", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_MAX_COALESCED_ROWS", "daemon.extraArgs", LEARNED),
    changed("$LATENCY_MAX_CONCURRENT_DISPATCHES", "daemon.extraArgs", LEARNED),
    kept("$HEADROOM_SELECTION_STRATEGY", "daemon.extraEnv", "the daemon reads the variable too: the strategy of plugins that set none"),
    none("$SLO_BUFFER_FACTOR", OLD_VARIABLE),
    none("$HEADROOM_TTFT_WEIGHT", OLD_VARIABLE),
    none("$HEADROOM_TPOT_WEIGHT", OLD_VARIABLE),
    none("$NEG_HEADROOM_TTFT_WEIGHT", OLD_VARIABLE),
    none("$NEG_HEADROOM_TPOT_WEIGHT", OLD_VARIABLE),
    none("$NEG_HEADROOM_EPSILON", OLD_VARIABLE),
    none("$COMPOSITE_KV_WEIGHT", OLD_VARIABLE),
    none("$COMPOSITE_QUEUE_WEIGHT", OLD_VARIABLE),
    none("$COMPOSITE_PREFIX_WEIGHT", OLD_VARIABLE),
    none("$STICKY_EPSILON", OLD_VARIABLE),
    none("$AFFINITY_GATE_TAU", OLD_VARIABLE),
    none("$AFFINITY_GATE_TAU_GLOBAL", OLD_VARIABLE),
    none("$POD_SELECTION_MODE", OLD_VARIABLE),
    none("$SAMPLING_MEAN", OLD_VARIABLE),
    none("$MAX_SAMPLED_TOKENS", OLD_VARIABLE),
    none("$SD_QUEUE_DEPTH_THRESHOLD", OLD_VARIABLE),
    none("$SD_KV_CACHE_UTIL_THRESHOLD", OLD_VARIABLE),
    none("$SD_METRICS_STALENESS_THRESHOLD", OLD_VARIABLE),
    none("$ENABLE_EXPERIMENTAL_FLOW_CONTROL_LAYER", "featureGates: [flowControl] in the configuration turns it on").harmless(&["false"]),
    changed("$ENABLE_EXPERIMENTAL_DATALAYER_V2", "", "the daemon has one data layer"),
];
