//! The rows of the migration table for the charts' values.
//!
//! Sources: `config/charts` of llm-d-router (`llm-d-router-gateway`, `llm-d-router-standalone`,
//! `routerlib`) of August 2026; `inferencepool` and `standalone` of the Gateway API Inference
//! Extension, v1.0 to v1.5.

use super::{MigrationRow, changed, kept, none};

const OWN_IMAGE: &str = "the chart names its own images";
const LEARNED: &str =
    "latencies are learned in the daemon and predicted in the proxy; there are no servers for it";
const NO_TOKENIZER: &str =
    "tokens are estimated from the prompt's bytes and corrected by cached_tokens of the replies";
const NO_SPANS: &str = "spans have settings of their own here: tags of Envoy's span, or --otlp-endpoint of the daemon (docs/how-to/traces.md)";
const OWN_PROXY: &str =
    "the chart has its own Envoy configuration, in which the picker is a filter";
const FIXED_PORT: &str = "the chart's Services have fixed ports";

/// The values of the charts.
#[rustfmt::skip] // a table
pub const VALUES: &[MigrationRow] = &[
    changed("router.epp.replicas", "daemon.replicas", "two daemons: one leads, one stands by; every proxy picks, so more daemons do not pick faster")
        .older(&["inferenceExtension.replicas"]),
    changed("router.epp.enableLeaderElection", "daemon.replicas", "daemons always elect a leader by a Lease")
        .older(&["inferenceExtension.enableLeaderElection"]),
    changed("router.epp.image", "", OWN_IMAGE).older(&["inferenceExtension.image"]),
    changed("router.epp.extProcPort", "", "endpointPickerRef must name port 9002 of the picker's Service")
        .older(&["inferenceExtension.extProcPort"]),
    changed("router.epp.grpcHealthPort", "", FIXED_PORT),
    changed("router.metricsPort", "", "metrics are on port 9091 of daemons").older(&["inferenceExtension.metricsPort"]),
    kept("router.epp.parsers", "pools[].config", "requestHandler.parsers of the configuration").older(&["inferencePool.parser"]),
    kept("router.epp.metricsDataSource.scheme", "pools[].config", "a parameter of metrics-data-source")
        .older(&["inferenceExtension.metricsDataSource.scheme"]),
    kept("router.epp.metricsDataSource.path", "pools[].config", "a parameter of metrics-data-source")
        .older(&["inferenceExtension.metricsDataSource.path"]),
    changed("router.epp.metricsDataSource.insecureSkipVerify", "", "needs https; certificates are then checked unless the daemon has --endpoint-tls-insecure")
        .older(&["inferenceExtension.metricsDataSource.insecureSkipVerify"]),
    kept("router.epp.pluginsConfigFile", "pools[].config", "the file that it names is the pool's configuration")
        .older(&["inferenceExtension.pluginsConfigFile"]),
    kept("router.epp.pluginsCustomConfig", "pools[].config", "the items of the file are listed one by one")
        .older(&["inferenceExtension.pluginsCustomConfig"]),
    none("router.epp.extraContainerPorts", "the daemon's pod has the daemon's ports only").older(&["inferenceExtension.extraContainerPorts"]),
    changed("router.epp.resources", "daemon.resources", "not copied: picking happens in the proxies; with extProc plan one core for a few hundred requests/s")
        .older(&["inferenceExtension.resources"]),
    kept("router.epp.affinity", "daemon.affinity", "of the daemon's pods").older(&["inferenceExtension.affinity"]),
    kept("router.epp.tolerations", "daemon.tolerations", "of the daemon's pods").older(&["inferenceExtension.tolerations"]),
    kept("router.epp.podAnnotations", "daemon.podAnnotations", "of the daemon's pods"),
    kept("router.epp.volumes", "daemon.extraVolumes", "of the daemon's pods").older(&["inferenceExtension.volumes"]),
    kept("router.epp.volumeMounts", "daemon.extraVolumeMounts", "of the daemon's pods").older(&["inferenceExtension.volumeMounts"]),
    kept("router.clusterDomain", "clusterDomain", "part of the name in the daemon's certificate"),

    kept("router.modelServers.matchLabels", "pools[].modelServers.matchLabels", "the selector of the InferencePool; used only where the chart makes it")
        .older(&["inferencePool.modelServers.matchLabels", "inferenceExtension.endpointsServer.endpointSelector"]),
    kept("router.modelServers.targetPorts", "pools[].modelServers.targetPorts", "the target ports of the InferencePool; used only where the chart makes it")
        .older(&["inferencePool.targetPorts", "inferenceExtension.endpointsServer.targetPorts"]),
    kept("router.modelServers.targetPortNumber", "pools[].modelServers.targetPorts", "the target port of the InferencePool; used only where the chart makes it")
        .older(&["inferencePool.targetPortNumber"]),
    kept("router.modelServers.type", "pools[].config", "defaultEngine of core-metrics-extractor")
        .older(&["inferencePool.modelServerType", "inferenceExtension.endpointsServer.modelServerType"]),
    none("router.modelServers.protocol", "HTTP/2 to model servers is pools[].appProtocol, but bodies are read as JSON: gRPC requests are not parsed")
        .older(&["inferencePool.modelServerProtocol", "inferenceExtension.endpointsServer.modelServerProtocol"]).harmless(&["http", "h2c"]),
    kept("router.inferencePool.create", "pools[].inferencePool", "the InferencePool that exists is used; without one the chart makes it (pools[].modelServers)")
        .older(&["inferenceExtension.endpointsServer.createInferencePool"]),
    kept("router.inferencePool.failureMode", "extProc.failureMode", "stays in the InferencePool that exists; the value is for one that the chart makes")
        .older(&["inferenceExtension.failureMode"]),
    changed("inferencePool.apiVersion", "pools[].inferencePool.apiVersion", "inference.networking.k8s.io/v1 unless it names the older group"),
    kept("router.inferenceObjectives", "pools[].objects", "InferenceObjectives of the pool's namespace are read; keep those of llm-d's release")
        .older(&["inferenceObjectives"]),

    kept("router.proxy.enabled", "gateway.enabled", "the gateway of the chart: Envoy with the picker inside").older(&["inferenceExtension.sidecar.enabled"]),
    none("router.proxy.proxyType", "the gateway of the chart is Envoy; agentgateway cannot load the filter, but may call the daemon by ext_proc").harmless(&["envoy"]),
    changed("router.proxy.mode", "gateway.enabled", "the gateway is a Deployment of its own; it does not need to be near the daemon"),
    kept("router.proxy.replicas", "gateway.replicas", "of the gateway"),
    kept("router.proxy.failOpen", "picker.failure_mode", "before the first state any endpoint serves; later proxies keep the last state"),
    kept("router.proxy.resources", "gateway.resources", "of the gateway's Envoy").older(&["inferenceExtension.sidecar.resources"]),
    changed("router.proxy.presets", "gateway", OWN_PROXY),
    changed("router.proxy", "gateway", OWN_PROXY).older(&["inferenceExtension.sidecar"]),
    kept("router.extraServicePorts", "gateway.service.port", "the port for clients; other ports are not copied")
        .older(&["inferenceExtension.extraServicePorts"]),

    kept("router.monitoring.interval", "monitoring.podMonitor.interval", "of the PodMonitors").older(&["inferenceExtension.monitoring.interval"]),
    none("router.monitoring.provider.gmp", "the chart has no PodMonitoring of Google Managed Prometheus: write one for port 9091").harmless(&["{autopilot: false}"]),
    none("router.monitoring.provider.name", "the chart has no PodMonitoring of Google Managed Prometheus: write one for port 9091")
        .harmless(&["", "prometheusoperator"]).with("router.monitoring.prometheus.enabled"),
    none("router.monitoring.gke.enabled", "the chart has no PodMonitoring of Google Managed Prometheus: write one for port 9091")
        .older(&["inferenceExtension.monitoring.gke.enabled"]).harmless(&["false"]),
    kept("router.monitoring.prometheus.enabled", "monitoring.podMonitor.enabled", "PodMonitors instead of a ServiceMonitor; docs/reference/metrics.md lists the llm_d_epp_* that are published")
        .older(&["inferenceExtension.monitoring.prometheus.enabled"]),
    changed("router.monitoring.prometheus.auth", "", "port 9091 serves metrics and nothing else; the NetworkPolicy decides who may scrape")
        .older(&["inferenceExtension.monitoring.prometheus.auth", "gke.monitoringSecret"]),
    kept("router.monitoring.prometheus.extraLabels", "monitoring.podMonitor.labels", "of the PodMonitors")
        .older(&["inferenceExtension.monitoring.prometheus.extraLabels"]),

    none("router.tracing.enabled", NO_SPANS).older(&["inferenceExtension.tracing.enabled"]).harmless(&["false"]),
    none("router.tracing", NO_SPANS).older(&["inferenceExtension.tracing"]).with("router.tracing.enabled"),
    changed("router.tokenizer", "", NO_TOKENIZER),
    kept("router.latencyPredictor.enabled", "daemon.extraArgs", "--latency-prediction: the daemon learns latencies, the proxies predict them")
        .older(&["inferenceExtension.latencyPredictor.enabled"]),
    changed("router.latencyPredictor", "daemon.extraArgs", LEARNED).older(&["inferenceExtension.latencyPredictor"]),

    none("provider.name", "the chart writes no objects of GKE (GCPBackendPolicy, HealthCheckPolicy): write them for the daemon's Service").harmless(&["", "none", "istio"]),
    changed("provider.istio.destinationRule", "extProc.istio.enabled", "the chart writes the DestinationRule for the picker's Service").older(&["istio.destinationRule"]),
    none("provider.gke.preferredBackends", "the chart has no preferred and standby pickers; daemons elect a leader").with("provider.gke.preferredBackends.enabled"),
    none("provider.gke.preferredBackends.enabled", "the chart has no preferred and standby pickers; daemons elect a leader").harmless(&["false"]),
    changed("provider.gke.autopilot", "", "nothing in the chart depends on it"),
    changed("httpRoute.create", "extProc.parentRefs", "the HTTPRoute of llm-d's release goes on: keep it, or let the chart write one for a pool that it makes")
        .older(&["experimentalHttpRoute.enabled"]),
    changed("httpRoute", "extProc.parentRefs", "the HTTPRoute of llm-d's release goes on: keep it, or let the chart write one for a pool that it makes")
        .older(&["experimentalHttpRoute"]),
];
