//! Measures the cost of each filter and option of the shipped files by itself. One Envoy has the
//! shipped listener, and for each option a copy of it without that option or with another value.
//! In every round the shipped listener and the copy run one right after the other, in an order
//! that alternates.
//!
//! Options of clusters and of the whole process (overload manager) are not measured: they cannot
//! differ between the listeners of one Envoy.

use std::net::SocketAddr;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use testbed::envoy::EnvoyConfig;
use testbed::front::{DaemonAndEnvoy, ExtraArgs};
use testbed::ports::ReservedPort;
use testbed::process::ChildProcess;
use testbed::{Error, Result};

use crate::load::{LoadFigures, LoadRun};
use crate::overhead::{CENTRES, CONNECTIONS, ENDPOINTS, write_bodies};
use crate::stats::{PairedDifference, median};
use crate::world::{addresses, listeners};
use crate::{Args, sink, write_result};

/// The HTTP connection manager of a listener.
const MANAGER: &str = "/filter_chains/0/filters/0/typed_config";

/// A filter or an option of the shipped listener, and what it is compared with.
pub(crate) struct ShippedOption {
    pub(crate) name: &'static str,
    pub(crate) instead: &'static str,
    /// Changes the copy of the listener; none if the shipped file does not have the option.
    edit: fn(&mut Value) -> Option<()>,
}

/// Options that one Envoy and one part of the bench measure.
pub(crate) struct OptionSet {
    /// The part, and the name of its results.
    part: &'static str,
    options: &'static [ShippedOption],
}

/// The filters and options of the shipped files.
pub(crate) static SHIPPED: OptionSet = OptionSet {
    part: "options",
    options: &OPTIONS,
};

/// Traces. The filter in a copy has a configuration of its own, and with it a context of its own in
/// the VM: the first row says what that costs by itself.
pub(crate) static TRACES: OptionSet = OptionSet {
    part: "traces",
    options: &[
        ShippedOption {
            name: NO_TRACES,
            instead: "the same with a filter of its own: the noise",
            edit: |listener| trace(listener, false, None),
        },
        ShippedOption {
            name: NO_TRACES,
            instead: "`trace_tags`, and Envoy makes no spans",
            edit: |listener| trace(listener, true, None),
        },
        ShippedOption {
            name: NO_TRACES,
            instead: "`tracing.yaml`, no request sampled",
            edit: |listener| trace(listener, true, Some(0)),
        },
        ShippedOption {
            name: NO_TRACES,
            instead: "`tracing.yaml`, 1 % of the requests",
            edit: |listener| trace(listener, true, Some(1)),
        },
        ShippedOption {
            name: NO_TRACES,
            instead: "`tracing.yaml`, every request",
            edit: |listener| trace(listener, true, Some(100)),
        },
    ],
};

const OPTIONS: [ShippedOption; 15] = [
    ShippedOption {
        name: "the same listener twice: the noise",
        instead: "the same",
        edit: |_| Some(()),
    },
    ShippedOption {
        name: "access log",
        instead: "no access log",
        edit: |listener| remove(listener, "access_log"),
    },
    ShippedOption {
        name: "access log",
        instead: "failures and 10 % of the rest",
        edit: sample_log,
    },
    ShippedOption {
        name: "access log",
        instead: "`served` by CEL added",
        edit: |listener| {
            let served = "%CEL(response.code_details == 'via_upstream' ? upstream.address : '')%";
            log_fields(listener)?.insert("served".to_owned(), served.into());
            Some(())
        },
    },
    ShippedOption {
        name: "access log",
        instead: "without `decision`",
        edit: |listener| log_fields(listener)?.remove("decision").map(drop),
    },
    ShippedOption {
        name: "headers of the picker removed from clients' requests",
        instead: "kept",
        edit: |listener| remove(listener, "early_header_mutation_extensions"),
    },
    ShippedOption {
        name: "error formats (`local_reply_config`)",
        instead: "none",
        edit: |listener| remove(listener, "local_reply_config"),
    },
    ShippedOption {
        name: "path normalisation",
        instead: "off",
        edit: |listener| {
            remove(listener, "path_with_escaped_slashes_action")?;
            remove(listener, "normalize_path")?;
            remove(listener, "merge_slashes")
        },
    },
    ShippedOption {
        name: "time limits of requests",
        instead: "none",
        edit: |listener| {
            remove(listener, "request_timeout")?;
            remove(listener, "request_headers_timeout")?;
            *listener
                .pointer_mut(MANAGER)?
                .get_mut("stream_idle_timeout")? = "0s".into();
            Some(())
        },
    },
    ShippedOption {
        name: "retry back-off",
        instead: "Envoy's default",
        edit: remove_back_off,
    },
    ShippedOption {
        name: "`gunzip`",
        instead: "no filter",
        edit: |listener| remove_filter(listener, "gunzip"),
    },
    ShippedOption {
        name: "`unzstd`",
        instead: "no filter",
        edit: |listener| remove_filter(listener, "unzstd"),
    },
    ShippedOption {
        name: READ_LIMIT,
        instead: "32 KiB",
        edit: |listener| read_limit(listener, 32 << 10),
    },
    ShippedOption {
        name: READ_LIMIT,
        instead: "128 KiB",
        edit: |listener| read_limit(listener, 128 << 10),
    },
    ShippedOption {
        name: READ_LIMIT,
        instead: "1 MiB (Envoy's default)",
        edit: |listener| read_limit(listener, 1 << 20),
    },
];

const NO_TRACES: &str = "no traces";
const READ_LIMIT: &str = "`per_connection_buffer_limit_bytes`";

/// Connections of the cases; with one connection, everything runs on one core.
const LOADS: [usize; 2] = [CONNECTIONS, 1];

/// One row of `options.json` or `traces.json`: what the shipped value costs more.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct OptionRow {
    pub(crate) option: String,
    pub(crate) instead: String,
    pub(crate) body_bytes: usize,
    pub(crate) connections: usize,
    /// CPU of Envoy per request with the shipped value, and with the other one.
    pub(crate) shipped_cpu_us: f64,
    pub(crate) other_cpu_us: f64,
    pub(crate) cost_cpu_us: f64,
    pub(crate) iqr_cpu_us: f64,
    pub(crate) cost_p50_us: f64,
    pub(crate) iqr_p50_us: f64,
    pub(crate) errors: u64,
}

/// The shipped listener and a changed copy for each option.
struct OptionListeners {
    front: DaemonAndEnvoy,
    ports: Vec<ReservedPort>,
    _servers: (ReservedPort, ChildProcess),
}

pub(crate) async fn bench(set: &'static OptionSet, args: &Args) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut world = OptionListeners::start(set, args, folder.path()).await?;
    let mut rows = Vec::new();
    let loads = if args.quick { &LOADS[..1] } else { &LOADS[..] };
    for body_bytes in CENTRES {
        for &connections in loads {
            for (at, option) in set.options.iter().enumerate() {
                let pair = world
                    .measure(args, at, (body_bytes, connections), folder.path())
                    .await?;
                rows.push(row(option, (body_bytes, connections), &pair));
            }
        }
    }
    world.front.stop().await?;
    write_result(set.part, &rows)
}

fn row(
    option: &ShippedOption,
    (body_bytes, connections): (usize, usize),
    [shipped, other]: &[Vec<LoadFigures>; 2],
) -> OptionRow {
    let of = |figure: fn(&LoadFigures) -> f64, runs: &[LoadFigures]| {
        runs.iter().map(figure).collect::<Vec<f64>>()
    };
    let cost = |figure| PairedDifference::of(&of(figure, shipped), &of(figure, other));
    let cpu = cost(|run| run.cpu_us);
    let p50 = cost(|run| run.p50_us);
    let row = OptionRow {
        option: option.name.to_owned(),
        instead: option.instead.to_owned(),
        body_bytes,
        connections,
        shipped_cpu_us: median(&of(|run| run.cpu_us, shipped)),
        other_cpu_us: median(&of(|run| run.cpu_us, other)),
        cost_cpu_us: cpu.median,
        iqr_cpu_us: cpu.iqr,
        cost_p50_us: p50.median,
        iqr_p50_us: p50.iqr,
        errors: shipped.iter().chain(other).map(|run| run.errors).sum(),
    };
    println!(
        "{body_bytes:>7} B c={connections:<2} cpu {:>6.1} costs {:>6.1} ({:.1}) us  p50 costs {:>7.1} ({:.1}) us  errors {}  {} / {}",
        row.shipped_cpu_us,
        row.cost_cpu_us,
        row.iqr_cpu_us,
        row.cost_p50_us,
        row.iqr_p50_us,
        row.errors,
        row.option,
        row.instead
    );
    row
}

// === impl OptionListeners ===

impl OptionListeners {
    async fn start(set: &OptionSet, args: &Args, folder: &Path) -> Result<Self> {
        let servers = ReservedPort::lease()?;
        let sink = sink::start(&[format!("0.0.0.0:{}", servers.number())], folder)?;
        let endpoints = addresses(ENDPOINTS, servers.number());
        let ports = set
            .options
            .iter()
            .map(|_| ReservedPort::lease())
            .collect::<Result<Vec<_>>>()?;
        let more = ExtraArgs {
            daemon: &args.daemon_argument,
            envoy: &["--concurrency", "1"],
        };
        let front = DaemonAndEnvoy::start(&endpoints, more, |config| {
            set.options
                .iter()
                .zip(&ports)
                .try_for_each(|(option, port)| add_changed(config, option, port.address()))
        });
        Ok(Self {
            front: front.await?,
            ports,
            _servers: (servers, sink),
        })
    }

    /// Measures the shipped listener and the copy of option `at`.
    async fn measure(
        &mut self,
        args: &Args,
        at: usize,
        case: (usize, usize),
        folder: &Path,
    ) -> Result<[Vec<LoadFigures>; 2]> {
        let (body_bytes, connections) = case;
        let bodies = write_bodies(body_bytes, false, folder)?;
        let processes = [self.front.envoy().id(), self.front.daemon().id()];
        let targets = [DaemonAndEnvoy::address(), self.ports[at].address()];
        let mut runs: [Vec<LoadFigures>; 2] = Default::default();
        for round in 0..args.rounds {
            for turn in 0..targets.len() {
                let at = (round + turn) % targets.len();
                let load = LoadRun::closed_loop(
                    targets[at],
                    bodies.clone(),
                    connections,
                    args.seconds,
                    processes,
                );
                runs[at].push(load.run(folder).await?);
            }
        }
        Ok(runs)
    }
}

/// Adds a copy of the shipped listener with one option changed.
fn add_changed(
    config: &mut EnvoyConfig,
    option: &ShippedOption,
    address: SocketAddr,
) -> Result<()> {
    let listeners = listeners(config)?;
    let mut listener = listeners
        .first()
        .cloned()
        .ok_or("the config has no listener")?;
    (option.edit)(&mut listener)
        .ok_or_else(|| Error::from(format!("the shipped file has no option {}", option.name)))?;
    listener["name"] = format!("{}: {}", option.name, option.instead).into();
    listener["address"]["socket_address"]["port_value"] = address.port().into();
    listeners.push(listener);
    Ok(())
}

// === Edits of a listener ===

/// Removes a field of the connection manager.
fn remove(listener: &mut Value, field: &str) -> Option<()> {
    listener
        .pointer_mut(MANAGER)?
        .as_object_mut()?
        .remove(field)
        .map(drop)
}

fn remove_filter(listener: &mut Value, name: &str) -> Option<()> {
    let filters = listener
        .pointer_mut(MANAGER)?
        .get_mut("http_filters")?
        .as_array_mut()?;
    let at = filters.iter().position(|filter| filter["name"] == name)?;
    filters.remove(at);
    Some(())
}

fn log_fields(listener: &mut Value) -> Option<&mut serde_json::Map<String, Value>> {
    listener
        .pointer_mut(MANAGER)?
        .pointer_mut("/access_log/0/typed_config/log_format/json_format")?
        .as_object_mut()
}

/// Logs failures and a tenth of the other requests, as the shipped file has it in a comment.
fn sample_log(listener: &mut Value) -> Option<()> {
    let log = listener
        .pointer_mut(MANAGER)?
        .pointer_mut("/access_log/0")?
        .as_object_mut()?;
    let sampled = json!({"runtime_filter": {"runtime_key": "switchpoint.access_log_percent", "percent_sampled": {"numerator": 10}}});
    let failed = json!({"status_code_filter": {"comparison": {
        "op": "GE", "value": {"default_value": 400, "runtime_key": "switchpoint.access_log_status"},
    }}});
    log.insert(
        "filter".to_owned(),
        json!({"or_filter": {"filters": [sampled, failed]}}),
    );
    Some(())
}

fn remove_back_off(listener: &mut Value) -> Option<()> {
    let routes = listener
        .pointer_mut(MANAGER)?
        .pointer_mut("/route_config/virtual_hosts/0/routes")?
        .as_array_mut()?;
    let removed = routes.iter_mut().filter_map(|route| {
        route
            .get_mut("route")?
            .as_object_mut()?
            .remove("retry_policy")
    });
    (removed.count() > 0).then_some(())
}

/// Sets whether the picker tags spans; with `percent`, Envoy also makes spans of this share of the
/// requests. Instead of a collector, they go to the daemon, which refuses them.
fn trace(listener: &mut Value, tags: bool, percent: Option<u32>) -> Option<()> {
    let manager = listener.pointer_mut(MANAGER)?;
    if let Some(percent) = percent {
        let mut tracing = EnvoyConfig::shipped("tracing.yaml")
            .ok()?
            .value()
            .get("tracing")?
            .clone();
        *tracing.pointer_mut("/provider/typed_config/grpc_service/envoy_grpc/cluster_name")? =
            "switchpoint-state".into();
        *tracing.pointer_mut("/random_sampling/value")? = percent.into();
        manager
            .as_object_mut()?
            .insert("tracing".to_owned(), tracing);
    }
    let filters = manager.get_mut("http_filters")?.as_array_mut()?;
    let picker = filters
        .iter_mut()
        .find(|filter| filter["name"] == "switchpoint")?;
    let text = picker.pointer_mut("/typed_config/config/configuration/value")?;
    let mut config: Value = serde_json::from_str(text.as_str()?).ok()?;
    config
        .as_object_mut()?
        .insert("trace_tags".to_owned(), tags.into());
    *text = config.to_string().into();
    Some(())
}

fn read_limit(listener: &mut Value, bytes: u32) -> Option<()> {
    *listener.get_mut("per_connection_buffer_limit_bytes")? = bytes.into();
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_in_the_shipped_file_and_its_copy_differs() {
        let mut shipped = EnvoyConfig::shipped("standalone.yaml").unwrap();
        let listener = listeners(&mut shipped).unwrap()[0].clone();
        for option in OPTIONS[1..].iter().chain(TRACES.options) {
            let mut copy = listener.clone();
            assert_eq!((option.edit)(&mut copy), Some(()), "{}", option.name);
            assert_ne!(copy, listener, "{}: {}", option.name, option.instead);
        }
    }
}
