//! The listener and the tasks of the ext_proc server.

mod authority;
mod daemon_link;
mod otlp;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use exchange::{
    DestinationFormat, DestinationSettings, ExchangeSettings, FailureMode, FlowRequestSettings,
    HeaderTrust, RetrySettings, SubsetSettings,
};
use ext_proc::{
    CONNECTION_WINDOW_BYTES, ExtProcServer, ExtProcService, METADATA_BYTES_MAX,
    STREAM_WINDOW_BYTES, STREAMS_PER_CONNECTION_MAX, SpanQueue,
};
use reqwest::Url;

use self::authority::PickerServices;
use self::daemon_link::DaemonLink;
use crate::cli::args::{self, ExtProcArgs};
use crate::daemon::tasks::TaskGroup;
use crate::error::FatalError;
use crate::pool::discovery_source::DiscoverySetup;
use crate::serve::health::HealthChecks;
use crate::serve::listen::{IncomingConnections, ListenerName, ServerTls, TlsFiles, identify};
use crate::serve::monitoring::{ended, open, server};
use crate::shutdown::Shutdown;
use crate::state::shared::DaemonState;

#[derive(Debug)]
pub struct ExtProcListener {
    ext_proc: IncomingConnections,
    settings: ExchangeSettings,
    destination_namespace: Option<String>,
    collector: Option<Url>,
}

// === impl ExtProcListener ===

impl ExtProcListener {
    /// Opens the listener. Returns `None` if no listener is configured.
    ///
    /// # Errors
    /// Returns [`FatalError::Listen`] if the listener cannot be opened.
    pub async fn open(args: ExtProcArgs, shutdown: &Shutdown) -> Result<Option<Self>, FatalError> {
        let Some(address) = args.listen_ext_proc.0 else {
            return Ok(None);
        };
        let settings = settings(&args);
        let destination_namespace = args.exchanges.ext_proc_destination_namespace.clone();
        let collector = args.otlp_endpoint.clone();
        let ext_proc = open(ListenerName::ExtProc, address, tls(args), shutdown).await?;
        Ok(Some(Self {
            ext_proc,
            settings,
            destination_namespace,
            collector,
        }))
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.ext_proc.address()
    }

    /// Serves with the tasks of `group`. Reports to `health` whether requests can be decided.
    pub fn spawn(
        self,
        group: &mut TaskGroup,
        shared: &Arc<DaemonState>,
        discovery: &DiscoverySetup,
        health: HealthChecks,
    ) -> Arc<ExtProcServer> {
        let TaskGroup {
            tasks, shutdown, ..
        } = group;
        let Self {
            ext_proc,
            settings,
            destination_namespace,
            collector,
        } = self;
        let ext_proc_server =
            ExtProcServer::with_namespace(&shared.pools.names, destination_namespace);
        ext_proc_server.find_by(Box::new(PickerServices::new(&discovery.components)));
        if let Some(collector) = collector {
            let (queue, spans) = SpanQueue::new();
            let counts = Arc::clone(queue.counts());
            let stop = shutdown.clone();
            ext_proc_server.trace(queue);
            tasks.spawn(async move {
                otlp::export(collector, spans, counts, stop).await;
                "the exporter of spans"
            });
        }
        let service =
            ExtProcService::new(Arc::clone(&ext_proc_server), &settings, shutdown.receiver());
        let router = server()
            .max_concurrent_streams(STREAMS_PER_CONNECTION_MAX)
            .http2_max_header_list_size(METADATA_BYTES_MAX)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .layer(identify())
            .add_service(service)
            .add_service(health.service());
        let mut stop = shutdown.clone();
        tasks.spawn(async move {
            ended(
                router
                    .serve_with_incoming_shutdown(ext_proc, async move { stop.begun().await })
                    .await,
                "ext_proc listener",
            )
        });
        let link = DaemonLink::new(Arc::clone(&ext_proc_server), Arc::clone(shared));
        let stop = shutdown.clone();
        tasks.spawn(async move {
            link.follow_state(stop, health).await;
            "the ext_proc server"
        });
        ext_proc_server
    }
}

fn tls(args: ExtProcArgs) -> ServerTls {
    let ExtProcArgs {
        ext_proc_tls_cert,
        ext_proc_tls_key,
        ext_proc_tls_client_ca,
        ext_proc_plaintext,
        ..
    } = args;
    match ext_proc_tls_cert.zip(ext_proc_tls_key) {
        Some((cert, key)) => ServerTls::Files(TlsFiles {
            cert,
            key,
            client_ca: ext_proc_tls_client_ca,
        }),
        None if ext_proc_plaintext => ServerTls::Off,
        None => ServerTls::SelfSigned,
    }
}

/// Returns the default settings of exchanges, with the changes from the command line.
fn settings(args: &ExtProcArgs) -> ExchangeSettings {
    let given = args.exchanges.clone();
    let shipped = ExchangeSettings::default();
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    ExchangeSettings {
        destination: DestinationSettings {
            header: given
                .ext_proc_destination_header
                .unwrap_or(shipped.destination.header),
            format: match args.ext_proc_destination_format {
                args::DestinationFormatArg::Single => DestinationFormat::Single,
                args::DestinationFormatArg::List => DestinationFormat::List,
            },
            ..shipped.destination
        },
        client_header: given
            .ext_proc_client_header
            .unwrap_or(shipped.client_header),
        cache_salt_key: given
            .ext_proc_cache_salt_key
            .unwrap_or(shipped.cache_salt_key),
        objective_header: args.ext_proc_objective_header.into(),
        slo_headers: given
            .ext_proc_slo_headers
            .map_or(shipped.slo_headers, Into::into),
        explain: args.ext_proc_explain,
        model_header: given.ext_proc_model_header.unwrap_or(shipped.model_header),
        subset: SubsetSettings {
            namespace: given
                .ext_proc_subset_namespace
                .unwrap_or(shipped.subset.namespace),
            key: given.ext_proc_subset_key.unwrap_or(shipped.subset.key),
        },
        flow: FlowRequestSettings {
            namespace: given
                .ext_proc_fairness_namespace
                .unwrap_or(shipped.flow.namespace),
            key: given.ext_proc_fairness_key.unwrap_or(shipped.flow.key),
            header: given
                .ext_proc_fairness_header
                .map_or(shipped.flow.header, Into::into),
            ttl_header: given.ext_proc_ttl_header.unwrap_or(shipped.flow.ttl_header),
        },
        failure_mode: match given.ext_proc_failure_mode {
            Some(args::FailureModeArg::Open) => FailureMode::Open,
            Some(args::FailureModeArg::Close) => FailureMode::Close,
            None => shipped.failure_mode,
        },
        cold_start_wait_ms: given
            .ext_proc_cold_start_wait
            .map_or(shipped.cold_start_wait_ms, ms),
        body_limit_bytes: given
            .ext_proc_body_limit_bytes
            .and_then(|n| n.try_into().ok())
            .unwrap_or(shipped.body_limit_bytes),
        retry: RetrySettings {
            enabled: !given.ext_proc_no_retry,
            per_try_timeout_ms: given
                .ext_proc_per_try_timeout
                .map_or(shipped.retry.per_try_timeout_ms, ms),
        },
        ..shipped
    }
}

impl From<args::HeaderTrustArg> for HeaderTrust {
    fn from(given: args::HeaderTrustArg) -> Self {
        match given {
            args::HeaderTrustArg::Ignore => Self::Ignore,
            args::HeaderTrustArg::Trust => Self::Trust,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::args::{Cli, CliCommand};

    fn read(arguments: &str) -> ExchangeSettings {
        let CliCommand::Serve(serve) = Cli::try_parse_from(
            format!("switchpointd serve --endpoint 10.0.0.1:1 {arguments}").split_whitespace(),
        )
        .expect("a command line")
        .command
        else {
            panic!("another command")
        };
        settings(&serve.ext_proc)
    }

    #[test]
    fn nothing_said_is_as_shipped_but_for_the_format() {
        let mut shipped = ExchangeSettings::default();
        shipped.destination.format = DestinationFormat::Single;
        assert_eq!(format!("{:?}", read("")), format!("{shipped:?}"));
    }

    #[test]
    fn every_setting_is_taken() {
        let said = read(
            "--ext-proc-model-header x-m --ext-proc-destination-header x-d --ext-proc-subset-namespace ns --ext-proc-subset-key k \
             --ext-proc-failure-mode open --ext-proc-cold-start-wait 1ms --ext-proc-body-limit-bytes 2048 --ext-proc-per-try-timeout 3s \
             --ext-proc-no-retry --ext-proc-explain --ext-proc-objective-header trust --ext-proc-destination-format list \
             --ext-proc-fairness-namespace jwt --ext-proc-fairness-key payload/sub --ext-proc-fairness-header trust \
             --ext-proc-ttl-header x-ttl --ext-proc-slo-headers trust \
             --ext-proc-client-header x-c --ext-proc-cache-salt-key 0123456789abcdef",
        );
        let expected = ExchangeSettings {
            destination: DestinationSettings {
                header: "x-d".into(),
                ..ExchangeSettings::default().destination
            },
            subset: SubsetSettings {
                namespace: "ns".into(),
                key: "k".into(),
            },
            model_header: "x-m".into(),
            body_limit_bytes: 2048,
            failure_mode: FailureMode::Open,
            cold_start_wait_ms: 1,
            explain: true,
            client_header: "x-c".into(),
            cache_salt_key: "0123456789abcdef".into(),
            objective_header: HeaderTrust::Trust,
            slo_headers: HeaderTrust::Trust,
            flow: FlowRequestSettings {
                namespace: "jwt".into(),
                key: "payload/sub".into(),
                header: HeaderTrust::Trust,
                ttl_header: "x-ttl".into(),
            },
            retry: RetrySettings {
                enabled: false,
                per_try_timeout_ms: 3_000,
            },
            ..ExchangeSettings::default()
        };
        assert_eq!(format!("{said:?}"), format!("{expected:?}"));
    }
}
