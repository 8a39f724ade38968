//! The table of plain fields: how each is read, checked and printed.

use exchange::{DecideAt, DestinationFormat, FailureMode, FairnessHeader, ObjectiveHeader};
use scheduler::plugin::readable;
use scheduler::prefix::ENTRIES_MAX;

use super::value::ConfigValue;
use super::{FilterConfig, InvalidConfig, NAME_BYTES_MAX, StateTransport, invalid};

/// One plain field. The `path` of a nested field has a dot.
pub struct ConfigField {
    pub path: &'static str,
    pub kind: FieldKind,
    pub about: &'static str,
}

type FieldGetter<T> = fn(&FilterConfig) -> T;
type FieldSetter<T> = fn(&mut FilterConfig, T);

/// The type of a field, with the functions that read and write it.
pub enum FieldKind {
    Number {
        min: u64,
        max: u64,
        get: FieldGetter<u64>,
        set: FieldSetter<u64>,
    },
    Text {
        shape: ConfigShape,
        get: FieldGetter<String>,
        set: FieldSetter<String>,
    },
    Flag {
        get: FieldGetter<bool>,
        set: FieldSetter<bool>,
    },
    Choice {
        allowed: &'static [&'static str],
        get: FieldGetter<&'static str>,
        set: FieldSetter<&'static str>,
    },
}

/// The form of a text field.
#[derive(Clone, Copy)]
pub enum ConfigShape {
    Name,
    OptionalName,
    Header,
    OptionalHeader,
    Key,
    Path,
}

macro_rules! number {
    ($min:expr, $max:expr, $($place:ident).+: $t:ty) => {
        FieldKind::Number {
            min: $min,
            max: $max,
            get: |c| u64::try_from(c.$($place).+).unwrap_or(u64::MAX),
            set: |c, v| c.$($place).+ = <$t>::try_from(v).unwrap_or(<$t>::MAX),
        }
    };
}

macro_rules! text {
    ($shape:ident, $($place:ident).+) => {
        FieldKind::Text { shape: ConfigShape::$shape, get: |c| c.$($place).+.clone(), set: |c, v| c.$($place).+ = v }
    };
}

macro_rules! flag {
    ($($place:ident).+) => {
        FieldKind::Flag { get: |c| c.$($place).+, set: |c, v| c.$($place).+ = v }
    };
}

const DECIDE_AT: &[&str] = &["body", "headers"];
const FAILURE_MODES: &[&str] = &["close", "open"];
const DESTINATION_FORMATS: &[&str] = &["list", "single"];
const TRANSPORTS: &[&str] = &["grpc", "http"];
const OBJECTIVE_HEADERS: &[&str] = &["ignore", "trust"];

/// All plain fields. Their defaults are those of [`FilterConfig::default`].
pub const FIELDS: &[ConfigField] = &[
    ConfigField {
        path: "state.cluster",
        kind: text!(Name, state.cluster),
        about: readable("Envoy cluster of the daemon's state port"),
    },
    ConfigField {
        path: "state.authority",
        kind: text!(OptionalName, state.authority),
        about: readable(":authority of the stream; empty: the cluster's name"),
    },
    ConfigField {
        path: "state.transport",
        kind: FieldKind::Choice {
            allowed: TRANSPORTS,
            get: |c| {
                if c.state.transport == StateTransport::Http {
                    "http"
                } else {
                    "grpc"
                }
            },
            set: |c, v| {
                c.state.transport = if v == "http" {
                    StateTransport::Http
                } else {
                    StateTransport::Grpc
                }
            },
        },
        about: readable(
            "one gRPC stream, or HTTP calls (long polls) for proxies that allow no streams to their filters",
        ),
    },
    ConfigField {
        path: "state.silence_max_ms",
        kind: number!(1_000, 600_000, state.silence_max_ms: u64),
        about: readable(
            "a stream that is silent for this long is opened again (the daemon sends at least every 500 ms)",
        ),
    },
    ConfigField {
        path: "state.backoff_max_ms",
        kind: number!(100, 600_000, state.backoff_max_ms: u64),
        about: readable("longest pause between attempts to reach the daemon"),
    },
    ConfigField {
        path: "failure_mode",
        kind: FieldKind::Choice {
            allowed: FAILURE_MODES,
            get: |c| {
                if c.settings.failure_mode == FailureMode::Open {
                    "open"
                } else {
                    "close"
                }
            },
            set: |c, v| {
                c.settings.failure_mode = if v == "open" {
                    FailureMode::Open
                } else {
                    FailureMode::Close
                }
            },
        },
        about: readable("what happens to a request before the first state: 503, or any endpoint"),
    },
    ConfigField {
        path: "cold_start_wait_ms",
        kind: number!(0, 60_000, settings.cold_start_wait_ms: u64),
        about: readable("how long a request may wait for the first state"),
    },
    ConfigField {
        path: "decide_at",
        kind: FieldKind::Choice {
            allowed: DECIDE_AT,
            get: |c| {
                if c.settings.decide_at == DecideAt::Headers {
                    "headers"
                } else {
                    "body"
                }
            },
            set: |c, v| {
                c.settings.decide_at = if v == "headers" {
                    DecideAt::Headers
                } else {
                    DecideAt::Body
                }
            },
        },
        about: readable(
            "decide a request at its last byte, or at its headers without its body, for proxies that cannot hold a body",
        ),
    },
    ConfigField {
        path: "model_header",
        kind: text!(Header, settings.model_header),
        about: readable("header that names the model if the body is not read"),
    },
    ConfigField {
        path: "body_limit_bytes",
        kind: number!(1_024, 1 << 30, settings.body_limit_bytes: usize),
        about: readable(
            "largest request body on an inference path; keep Envoy's own limit above it",
        ),
    },
    ConfigField {
        path: "destination_format",
        kind: FieldKind::Choice {
            allowed: DESTINATION_FORMATS,
            get: |c| {
                if c.settings.destination.format == DestinationFormat::Single {
                    "single"
                } else {
                    "list"
                }
            },
            set: |c, v| {
                c.settings.destination.format = if v == "single" {
                    DestinationFormat::Single
                } else {
                    DestinationFormat::List
                };
            },
        },
        about: readable(
            "all ranked endpoints in one header, or the first in that header and the second in the fallback header",
        ),
    },
    ConfigField {
        path: "destination_header",
        kind: text!(Header, settings.destination.header),
        about: readable("header of the destination"),
    },
    ConfigField {
        path: "fallback_header",
        kind: text!(Header, settings.destination.fallback_header),
        about: readable("header of the second choice"),
    },
    ConfigField {
        path: "subset_namespace",
        kind: text!(Key, settings.subset.namespace),
        about: readable("namespace of the subset hint"),
    },
    ConfigField {
        path: "subset_key",
        kind: text!(Key, settings.subset.key),
        about: readable("key of the subset hint in that namespace"),
    },
    ConfigField {
        path: "ready_path",
        kind: text!(Path, settings.ready_path),
        about: readable("answers 200 once every pool has state"),
    },
    ConfigField {
        path: "explain",
        kind: flag!(settings.explain),
        about: readable("clients may request the reasons of a decision"),
    },
    ConfigField {
        path: "decision_log_one_in",
        kind: number!(0, 1_000_000_000, settings.decision_log.one_in: u32),
        about: readable(
            "one in this many decisions is recorded completely in the access log, for `switchpointd explain`; 0: none",
        ),
    },
    ConfigField {
        path: "decision_log_headers",
        kind: text!(Key, settings.decision_log.headers),
        about: readable(
            "request headers shown in a record, comma-separated; no other header's value is logged",
        ),
    },
    ConfigField {
        path: "trace_tags",
        kind: flag!(trace_tags),
        about: readable(
            "put the decision and the outcome of requests whose trace is sampled into filter state, for tags of Envoy's span",
        ),
    },
    ConfigField {
        path: "objective_header",
        kind: FieldKind::Choice {
            allowed: OBJECTIVE_HEADERS,
            get: |c| {
                if c.settings.objective_header == ObjectiveHeader::Trust {
                    "trust"
                } else {
                    "ignore"
                }
            },
            set: |c, v| {
                c.settings.objective_header = if v == "trust" {
                    ObjectiveHeader::Trust
                } else {
                    ObjectiveHeader::Ignore
                };
            },
        },
        about: readable(
            "whether x-llm-d-inference-objective sets a request's priority; trust it only if clients cannot set it",
        ),
    },
    ConfigField {
        path: "fairness_namespace",
        kind: text!(OptionalName, settings.flow.namespace),
        about: readable(
            "namespace of filter metadata with the fairness id of a request, for flow control; empty: none",
        ),
    },
    ConfigField {
        path: "fairness_key",
        kind: text!(OptionalName, settings.flow.key),
        about: readable(
            "path of the fairness id in that namespace, keys separated by /, such as jwt_payload/sub",
        ),
    },
    ConfigField {
        path: "fairness_header",
        kind: FieldKind::Choice {
            allowed: OBJECTIVE_HEADERS,
            get: |c| {
                if c.settings.flow.header == FairnessHeader::Trust {
                    "trust"
                } else {
                    "ignore"
                }
            },
            set: |c, v| {
                c.settings.flow.header = if v == "trust" {
                    FairnessHeader::Trust
                } else {
                    FairnessHeader::Ignore
                };
            },
        },
        about: readable(
            "whether x-llm-d-inference-fairness-id names a request's flow; trust it only if clients cannot set it",
        ),
    },
    ConfigField {
        path: "ttl_header",
        kind: text!(OptionalHeader, settings.flow.ttl_header),
        about: readable(
            "header by which a request shortens the time that flow control may hold it, in ms; empty: none",
        ),
    },
    ConfigField {
        path: "retry",
        kind: flag!(settings.retry.enabled),
        about: readable("retry failed attempts on the next ranked endpoint"),
    },
    ConfigField {
        path: "per_try_timeout_ms",
        kind: number!(0, 3_600_000, settings.retry.per_try_timeout_ms: u64),
        about: readable(
            "time that one attempt of a streamed request may take until its response headers; 0: no limit",
        ),
    },
    ConfigField {
        path: "prefix_entries",
        kind: number!(0, ENTRIES_MAX as u64, prefix_entries: usize),
        about: readable("entries of each pool's prefix index, in each worker; about 8 bytes each"),
    },
    ConfigField {
        path: "lease_ms",
        kind: number!(500, 60_000, lease_ms: u64),
        about: readable("how long a VM leads without renewing its lease"),
    },
    ConfigField {
        path: "sharing",
        kind: flag!(sharing),
        about: readable(
            "workers and proxies share their picks and the endpoints that failed; off only to measure the benefit",
        ),
    },
    ConfigField {
        path: "hold_headers",
        kind: flag!(hold_headers),
        about: readable(
            "hold headers until the decision; off where the proxy forbids it and filters after this one hold and set them",
        ),
    },
];

// === impl ConfigField ===

impl ConfigField {
    pub fn set(&self, config: &mut FilterConfig, value: ConfigValue) -> Result<(), InvalidConfig> {
        self.kind
            .set(config, value)
            .ok_or_else(|| invalid(self.path, self.kind.must()))
    }
}

// === impl FieldKind ===

impl FieldKind {
    /// Sets the field. `None` if the value is not allowed.
    pub fn set(&self, config: &mut FilterConfig, value: ConfigValue) -> Option<()> {
        match self {
            Self::Number { min, max, set, .. } => {
                let ConfigValue::Number(number) = value else {
                    return None;
                };
                set(config, Some(number).filter(|n| (min..=max).contains(&n))?);
            }
            Self::Text { shape, set, .. } => {
                let ConfigValue::Text(text) = value else {
                    return None;
                };
                set(config, shape.allows(&text).then_some(text)?);
            }
            Self::Flag { set, .. } => {
                let ConfigValue::Flag(flag) = value else {
                    return None;
                };
                set(config, flag);
            }
            Self::Choice { allowed, set, .. } => {
                let ConfigValue::Text(text) = value else {
                    return None;
                };
                set(config, allowed.iter().find(|a| **a == text)?);
            }
        }
        Some(())
    }

    pub fn must(&self) -> String {
        match self {
            Self::Number { min, max, .. } => format!("a whole number from {min} to {max}"),
            Self::Text { shape, .. } => shape.must(),
            Self::Flag { .. } => "true or false".to_owned(),
            Self::Choice { allowed, .. } => allowed
                .iter()
                .map(|a| format!("\"{a}\""))
                .collect::<Vec<_>>()
                .join(" or "),
        }
    }

    pub fn default(&self, defaults: &FilterConfig) -> String {
        match self {
            Self::Number { get, .. } => get(defaults).to_string(),
            Self::Text { get, .. } => format!("\"{}\"", get(defaults)),
            Self::Flag { get, .. } => get(defaults).to_string(),
            Self::Choice { get, .. } => format!("\"{}\"", get(defaults)),
        }
    }
}

// === impl ConfigShape ===

impl ConfigShape {
    pub fn allows(self, text: &str) -> bool {
        let printable = text.bytes().all(|b| b.is_ascii_graphic());
        match self {
            Self::Name => printable && (1..=NAME_BYTES_MAX).contains(&text.len()),
            Self::OptionalName => printable && text.len() <= NAME_BYTES_MAX,
            // The header names that HTTP/2 allows, so that the proxy cannot refuse it later.
            Self::Header => {
                (1..=128).contains(&text.len())
                    && text
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            }
            Self::OptionalHeader => text.is_empty() || Self::Header.allows(text),
            Self::Key => printable && (1..=128).contains(&text.len()),
            Self::Path => {
                printable
                    && (1..=128).contains(&text.len())
                    && text.starts_with('/')
                    && !text.contains('?')
            }
        }
    }

    pub fn must(self) -> String {
        match self {
            Self::Name => format!("text of 1 to {NAME_BYTES_MAX} printable ASCII characters"),
            Self::OptionalName => {
                format!("text of at most {NAME_BYTES_MAX} printable ASCII characters")
            }
            Self::Header => "a header name of 1 to 128 characters a-z, 0-9 and -".to_owned(),
            Self::OptionalHeader => {
                "empty, or a header name of at most 128 characters a-z, 0-9 and -".to_owned()
            }
            Self::Key => "text of 1 to 128 printable ASCII characters".to_owned(),
            Self::Path => {
                "a path of 1 to 128 printable ASCII characters that starts with / and has no ?"
                    .to_owned()
            }
        }
    }
}
