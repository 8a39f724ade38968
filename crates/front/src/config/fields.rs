//! The table of plain fields: how each field is read, checked and printed.

use exchange::{DecideAt, DestinationFormat, FailureMode, HeaderTrust};
use scheduler::plugin::readable;
use scheduler::prefix::ENTRIES_MAX;

use super::value::ConfigValue;
use super::{FilterConfig, InvalidConfig, NAME_BYTES_MAX, StateTransport, invalid};

/// One plain field. The `path` of a nested field has a dot, as in `state.cluster`.
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
        allowed: [&'static str; 2],
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
    OptionalSecret,
    Key,
    Path,
}

/// The minimum length of a secret, in bytes: 16 random characters cannot be guessed.
const SECRET_BYTES_MIN: usize = 16;

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

macro_rules! choice {
    ($($place:ident).+, $kind:ident, $first:literal: $one:ident, $second:literal: $other:ident) => {
        FieldKind::Choice {
            allowed: [$first, $second],
            get: |c| if c.$($place).+ == $kind::$one { $first } else { $second },
            set: |c, v| c.$($place).+ = if v == $first { $kind::$one } else { $kind::$other },
        }
    };
}

const fn field(path: &'static str, kind: FieldKind, about: &'static str) -> ConfigField {
    ConfigField {
        path,
        kind,
        about: readable(about),
    }
}

/// All plain fields. The defaults come from [`FilterConfig::default`].
pub const FIELDS: &[ConfigField] = &[
    field(
        "state.cluster",
        text!(Name, state.cluster),
        "Envoy cluster of the daemon's state port",
    ),
    field(
        "state.authority",
        text!(OptionalName, state.authority),
        ":authority of the stream; empty: the cluster's name",
    ),
    field(
        "state.transport",
        choice!(state.transport, StateTransport, "grpc": Grpc, "http": Http),
        "one gRPC stream, or HTTP calls (long polls) for proxies that allow no streams to their filters",
    ),
    field(
        "state.silence_max_ms",
        number!(1_000, 600_000, state.silence_max_ms: u64),
        "a stream that is silent for this long is opened again (the daemon sends at least every 500 ms)",
    ),
    field(
        "state.backoff_max_ms",
        number!(100, 600_000, state.backoff_max_ms: u64),
        "longest pause between attempts to reach the daemon",
    ),
    field(
        "failure_mode",
        choice!(settings.failure_mode, FailureMode, "close": Close, "open": Open),
        "what happens to a request before the first state: 503, or any endpoint",
    ),
    field(
        "cold_start_wait_ms",
        number!(0, 60_000, settings.cold_start_wait_ms: u64),
        "how long a request may wait for the first state",
    ),
    field(
        "decide_at",
        choice!(settings.decide_at, DecideAt, "body": Body, "headers": Headers),
        "decide a request at its last byte, or at its headers without its body, for proxies that cannot hold a body",
    ),
    field(
        "model_header",
        text!(Header, settings.model_header),
        "header that names the model if the body is not read",
    ),
    field(
        "body_limit_bytes",
        number!(1_024, 1 << 30, settings.body_limit_bytes: usize),
        "largest request body on an inference path; keep Envoy's own limit above it",
    ),
    field(
        "bodies_in_progress_bytes",
        number!(1_024, (1 << 32) - 1, bodies_in_progress_bytes: usize),
        "most bytes of request bodies that are not yet whole, in each worker; beyond, the slowest and largest of the clients above an equal share are refused",
    ),
    field(
        "unread_reset_ms",
        number!(0, 3_600_000, settings.unread_reset_ms: u64),
        "after how long without a byte a complete reply that its client does not read is reset; 0: never",
    ),
    field(
        "destination_format",
        choice!(settings.destination.format, DestinationFormat, "list": List, "single": Single),
        "all ranked endpoints in one header, or the first in that header and the second in the fallback header",
    ),
    field(
        "destination_header",
        text!(Header, settings.destination.header),
        "header of the destination",
    ),
    field(
        "fallback_header",
        text!(Header, settings.destination.fallback_header),
        "header of the second choice",
    ),
    field(
        "subset_namespace",
        text!(Key, settings.subset.namespace),
        "namespace of the subset hint",
    ),
    field(
        "subset_key",
        text!(Key, settings.subset.key),
        "key of the subset hint in that namespace",
    ),
    field(
        "ready_path",
        text!(Path, settings.ready_path),
        "answers 200 once every pool has state",
    ),
    field(
        "explain",
        flag!(settings.explain),
        "clients may request the reasons of a decision",
    ),
    field(
        "decision_log_one_in",
        number!(0, 1_000_000_000, settings.decision_log.one_in: u32),
        "one in this many decisions is recorded completely in the access log, for `switchpointd explain`; 0: none",
    ),
    field(
        "decision_log_headers",
        text!(Key, settings.decision_log.headers),
        "request headers shown in a record, comma-separated; no other header's value is logged",
    ),
    field(
        "trace_tags",
        flag!(trace_tags),
        "put the decision and the outcome of requests whose trace is sampled into filter state, for tags of Envoy's span",
    ),
    field(
        "client_header",
        text!(OptionalHeader, settings.client_header),
        "header by which a proxy in front names the authenticated client, in place of the client's own; empty: the fairness id, else the address",
    ),
    field(
        "cache_salt_key",
        text!(OptionalSecret, settings.cache_salt_key),
        "secret from which each authenticated client gets a cache_salt, so that no client learns what others have cached; empty: clients choose",
    ),
    field(
        "objective_header",
        choice!(settings.objective_header, HeaderTrust, "ignore": Ignore, "trust": Trust),
        "whether x-llm-d-inference-objective sets a request's priority; trust it only if clients cannot set it",
    ),
    field(
        "slo_headers",
        choice!(settings.slo_headers, HeaderTrust, "ignore": Ignore, "trust": Trust),
        "whether x-llm-d-slo-ttft-ms and the other SLO headers count; trust them only if clients cannot set them",
    ),
    field(
        "fairness_namespace",
        text!(OptionalName, settings.flow.namespace),
        "namespace of filter metadata with the fairness id of a request, for flow control; empty: none",
    ),
    field(
        "fairness_key",
        text!(OptionalName, settings.flow.key),
        "path of the fairness id in that namespace, keys separated by /, such as jwt_payload/sub",
    ),
    field(
        "fairness_header",
        choice!(settings.flow.header, HeaderTrust, "ignore": Ignore, "trust": Trust),
        "whether x-llm-d-inference-fairness-id names a request's flow; trust it only if clients cannot set it",
    ),
    field(
        "ttl_header",
        text!(OptionalHeader, settings.flow.ttl_header),
        "header by which a request shortens the time that flow control may hold it, in ms; empty: none",
    ),
    field(
        "retry",
        flag!(settings.retry.enabled),
        "retry failed attempts on the next ranked endpoint",
    ),
    field(
        "per_try_timeout_ms",
        number!(0, 3_600_000, settings.retry.per_try_timeout_ms: u64),
        "time that one attempt of a streamed request may take until its response headers; 0: no limit",
    ),
    field(
        "prefix_entries",
        number!(0, ENTRIES_MAX as u64, prefix_entries: usize),
        "entries of each pool's prefix index, in each worker; about 8 bytes each",
    ),
    field(
        "lease_ms",
        number!(500, 60_000, lease_ms: u64),
        "how long a VM leads without renewing its lease",
    ),
    field(
        "sharing",
        flag!(sharing),
        "workers and proxies share their picks and the endpoints that failed; off only to measure the benefit",
    ),
    field(
        "hold_headers",
        flag!(hold_headers),
        "hold headers until the decision; off where the proxy forbids it and filters after this one hold and set them",
    ),
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
    /// Sets the field in `config`. Returns `None` if the value is not allowed.
    pub fn set(&self, config: &mut FilterConfig, value: ConfigValue) -> Option<()> {
        match (self, value) {
            (Self::Number { min, max, set, .. }, ConfigValue::Number(number)) => {
                set(config, Some(number).filter(|n| (min..=max).contains(&n))?);
            }
            (Self::Text { shape, set, .. }, ConfigValue::Text(text)) => {
                set(config, shape.allows(&text).then_some(text)?);
            }
            (Self::Flag { set, .. }, ConfigValue::Flag(flag)) => set(config, flag),
            (Self::Choice { allowed, set, .. }, ConfigValue::Text(text)) => {
                set(config, allowed.iter().find(|a| **a == text)?);
            }
            _ => return None,
        }
        Some(())
    }

    pub fn must(&self) -> String {
        match self {
            Self::Number { min, max, .. } => format!("a whole number from {min} to {max}"),
            Self::Text { shape, .. } => shape.must(),
            Self::Flag { .. } => "true or false".to_owned(),
            Self::Choice {
                allowed: [first, second],
                ..
            } => format!("\"{first}\" or \"{second}\""),
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
            // Only header names that HTTP/2 allows are accepted, so that the proxy cannot refuse
            // the header later.
            Self::Header => {
                (1..=128).contains(&text.len())
                    && text
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            }
            Self::OptionalHeader => text.is_empty() || Self::Header.allows(text),
            Self::OptionalSecret => {
                text.is_empty()
                    || (printable && (SECRET_BYTES_MIN..=NAME_BYTES_MAX).contains(&text.len()))
            }
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
            Self::Name => printable_text("1 to", NAME_BYTES_MAX),
            Self::OptionalName => printable_text("at most", NAME_BYTES_MAX),
            Self::Header => "a header name of 1 to 128 characters a-z, 0-9 and -".to_owned(),
            Self::OptionalHeader => {
                "empty, or a header name of at most 128 characters a-z, 0-9 and -".to_owned()
            }
            Self::OptionalSecret => format!(
                "empty, or text of {SECRET_BYTES_MIN} to {NAME_BYTES_MAX} printable ASCII characters"
            ),
            Self::Key => printable_text("1 to", 128),
            Self::Path => {
                "a path of 1 to 128 printable ASCII characters that starts with / and has no ?"
                    .to_owned()
            }
        }
    }
}

#[inline(never)] // several callers, and the module should be small
fn printable_text(range: &str, max: usize) -> String {
    format!("text of {range} {max} printable ASCII characters")
}
