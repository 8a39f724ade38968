//! The filter's JSON configuration. The configuration is read strictly: an unknown field is an
//! error, and each error names the field and its allowed values.
//!
//! [`FIELDS`] is the only table of plain fields. This table is used to parse, check and document
//! the fields. Reading has no side effects, because the proxy tries every configuration in a
//! temporary VM first.

mod fields;
mod value;

use std::fmt;

use exchange::ExchangeSettings;
use exchange::json::JsonError;
use fields::{ConfigField, ConfigShape, FIELDS};
use scheduler::prefix::ENTRIES_DEFAULT;
use value::{ConfigFields, ConfigValue};

/// The maximum number of pools of one proxy. Each pool costs every worker a prefix index.
pub const POOLS_MAX: usize = 64;
/// The maximum number of clusters of one pool. The cluster of each request is compared with these
/// clusters one by one.
pub const CLUSTERS_MAX: usize = 64;
/// The longest name, in bytes, of a pool or cluster. With this limit, every length in the
/// serialized `GrpcService` is one ASCII byte (see `state_link/connection.rs`).
pub const NAME_BYTES_MAX: usize = 48;

/// The default limit of unfinished request bodies in each worker, in bytes. The limit has room for
/// five of the largest bodies, or a thousand prompts of 30,000 tokens. A worker holds at most twice
/// as many bytes, and half as many for retries, so six workers fit into the heap limit of the
/// shipped Envoy files (2 GiB).
const BODIES_IN_PROGRESS_BYTES: usize = 128 << 20;

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct FilterConfig {
    pub state: StateConfig,
    /// The pools. The configuration has at least one pool, and the names of pools are distinct.
    pub pools: Vec<PoolConfig>,
    pub settings: ExchangeSettings,
    /// The maximum number of entries of each pool's prefix index, in each worker.
    pub prefix_entries: usize,
    /// The maximum number of bytes of unfinished request bodies, in each worker.
    pub bodies_in_progress_bytes: usize,
    /// The time for which a VM leads without renewing its lease, in ms.
    pub lease_ms: u64,
    /// Whether workers and proxies share their load and placements.
    pub sharing: bool,
    /// Whether the filter holds the headers of a request until the decision. If false, a buffer
    /// filter after this filter must hold the headers, and another filter must set the routing
    /// headers.
    pub hold_headers: bool,
    /// Whether the proxy's trace span gets tags with the decision and the outcome of a sampled
    /// request.
    pub trace_tags: bool,
}

/// The settings of the connection to the daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateConfig {
    /// The name of the Envoy cluster of the daemon.
    pub cluster: String,
    /// The `:authority` of the stream. If empty, the cluster's name is used.
    pub authority: String,
    pub transport: StateTransport,
    /// The silence of the daemon after which the connection is opened again, in ms.
    pub silence_max_ms: u64,
    /// The longest pause between attempts to reach the daemon, in ms.
    pub backoff_max_ms: u64,
}

/// The transport of messages to and from the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateTransport {
    Grpc,
    Http,
}

/// A pool, and the clusters of the routes that lead to this pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// The daemon's name of the pool.
    pub name: String,
    /// The route clusters that belong to this pool.
    pub clusters: Vec<String>,
}

/// The reason why a configuration was refused: the field and its allowed values. The operator has
/// to change the field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidConfig {
    pub field: String,
    /// The required form of the value, as in "must be a number".
    pub must: String,
}

// === impl FilterConfig ===

/// The defaults of the filter. The defaults of `settings` are in [`ExchangeSettings::default`].
/// `pools` is empty here, because the configuration must have at least one pool.
impl Default for FilterConfig {
    fn default() -> Self {
        Self {
            state: StateConfig {
                cluster: "switchpoint-state".to_owned(),
                authority: String::new(),
                transport: StateTransport::Grpc,
                silence_max_ms: 5_000,
                backoff_max_ms: 2_000,
            },
            pools: Vec::new(),
            settings: ExchangeSettings::default(),
            prefix_entries: ENTRIES_DEFAULT,
            bodies_in_progress_bytes: BODIES_IN_PROGRESS_BYTES,
            lease_ms: 3_000,
            sharing: true,
            hold_headers: true,
            trace_tags: false,
        }
    }
}

impl FilterConfig {
    /// Reads a configuration.
    ///
    /// # Errors
    /// Returns [`InvalidConfig`] for the first field that is wrong.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidConfig> {
        let value = value::parse(json).map_err(not_json)?;
        let mut root = object(value, "configuration")?;
        let mut config = Self {
            pools: pools(root.remove("pools"))?,
            ..Self::default()
        };
        let mut state = root
            .remove("state")
            .map_or(Ok(ConfigFields::default()), |v| object(v, "state"))?;
        for field in FIELDS {
            let value = match field.path.strip_prefix("state.") {
                Some(key) => state.remove(key),
                None => root.remove(field.path),
            };
            if let Some(value) = value {
                field.set(&mut config, value)?;
            }
        }
        nothing_left(&state, "state.")?;
        nothing_left(&root, "")?;
        Ok(config)
    }

    /// Returns the maximum number of bytes of long request bodies that Envoy keeps for retries, in
    /// each worker: half of the limit of unfinished bodies. The default, 64 MiB, has room for 500
    /// prompts of 30,000 tokens.
    #[must_use]
    pub fn kept_bodies_bytes(&self) -> usize {
        self.bodies_in_progress_bytes / 2
    }

    /// Returns the index of the pool if the configuration has only one pool and this pool names no
    /// clusters.
    #[must_use]
    pub fn only_pool(&self) -> Option<usize> {
        matches!(self.pools.as_slice(), [only] if only.clusters.is_empty()).then_some(0)
    }

    /// Whether at least one pool is found by the cluster of a route.
    #[must_use]
    pub fn knows_clusters(&self) -> bool {
        self.pools.iter().any(|pool| !pool.clusters.is_empty())
    }

    #[must_use]
    pub fn pool_of_cluster(&self, cluster: &[u8]) -> Option<usize> {
        self.pools
            .iter()
            .position(|pool| pool.clusters.iter().any(|c| c.as_bytes() == cluster))
    }

    #[must_use]
    pub fn pool_named(&self, name: &[u8]) -> Option<usize> {
        self.pools
            .iter()
            .position(|pool| pool.name.as_bytes() == name)
    }
}

/// Returns the reference of the configuration: a line for each field, with its default and allowed
/// values.
#[must_use]
pub fn reference() -> String {
    let defaults = FilterConfig::default();
    let mut text = String::from(
        "pools (no default): one to 64 of {\"name\", \"clusters\"}: the pools, and the route clusters that mean each\n",
    );
    for ConfigField { path, kind, about } in FIELDS {
        text.push_str(&format!(
            "{path} ({}): {}: {about}\n",
            kind.default(&defaults),
            kind.must()
        ));
    }
    text
}

fn pools(value: Option<ConfigValue>) -> Result<Vec<PoolConfig>, InvalidConfig> {
    let must = || format!("a list of 1 to {POOLS_MAX} pools");
    let Some(ConfigValue::List(items)) = value else {
        return Err(invalid("pools", must()));
    };
    if items.is_empty() || items.len() > POOLS_MAX {
        return Err(invalid("pools", must()));
    }
    let mut pools: Vec<PoolConfig> = Vec::new();
    for (i, item) in items.into_iter().enumerate() {
        let next = pool(item, i)?;
        if pools.iter().any(|p| p.name == next.name) {
            return Err(invalid(
                &field_of(i, "name"),
                format!("another name: \"{}\" is taken", next.name),
            ));
        }
        if let Some(c) = next
            .clusters
            .iter()
            .find(|c| pools.iter().any(|p| p.clusters.contains(c)))
        {
            return Err(invalid(
                &field_of(i, "clusters"),
                format!("clusters of no other pool: \"{c}\" is taken"),
            ));
        }
        pools.push(next);
    }
    Ok(pools)
}

fn pool(value: ConfigValue, i: usize) -> Result<PoolConfig, InvalidConfig> {
    let mut fields = object(value, &format!("pools[{i}]"))?;
    let name = match fields.remove("name") {
        Some(ConfigValue::Text(name)) if ConfigShape::Name.allows(&name) => name,
        _ => return Err(invalid(&field_of(i, "name"), ConfigShape::Name.must())),
    };
    let must = || {
        invalid(
            &field_of(i, "clusters"),
            format!("a list of at most {CLUSTERS_MAX} cluster names"),
        )
    };
    let clusters = match fields.remove("clusters") {
        None => Vec::new(),
        Some(ConfigValue::List(items)) if items.len() <= CLUSTERS_MAX => items
            .into_iter()
            .map(|item| match item {
                ConfigValue::Text(cluster) if !cluster.is_empty() => Ok(cluster),
                _ => Err(must()),
            })
            .collect::<Result<_, _>>()?,
        Some(_) => return Err(must()),
    };
    nothing_left(&fields, &field_of(i, ""))?;
    Ok(PoolConfig { name, clusters })
}

/// Returns the path of a field of a pool.
#[inline(never)] // several callers, and the module should be small
fn field_of(i: usize, name: &str) -> String {
    format!("pools[{i}].{name}")
}

fn object(value: ConfigValue, field: &str) -> Result<ConfigFields, InvalidConfig> {
    match value {
        ConfigValue::Object(fields) => Ok(fields),
        _ => Err(invalid(field, "an object".to_owned())),
    }
}

fn nothing_left(fields: &ConfigFields, prefix: &str) -> Result<(), InvalidConfig> {
    match fields.left() {
        None => Ok(()),
        Some(unknown) => Err(invalid(
            &format!("{prefix}{unknown}"),
            "left out: there is no such field".to_owned(),
        )),
    }
}

fn not_json(error: JsonError) -> InvalidConfig {
    let what = match error {
        JsonError::Invalid { offset } => format!("JSON, and is not from byte {offset} on"),
        JsonError::TooDeep => "JSON of less depth".to_owned(),
    };
    invalid("configuration", what)
}

fn invalid(field: &str, must: String) -> InvalidConfig {
    InvalidConfig {
        field: field.to_owned(),
        must,
    }
}

// === impl InvalidConfig ===

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` must be {}", self.field, self.must)
    }
}

impl std::error::Error for InvalidConfig {}

#[cfg(test)]
mod tests {
    use exchange::{
        DecideAt, DecisionLogSettings, DestinationFormat, DestinationSettings, FailureMode,
        FlowRequestSettings, HeaderTrust, RetrySettings, SubsetSettings,
    };

    use super::fields::FieldKind;
    use super::*;

    fn error(json: &str) -> String {
        FilterConfig::parse(json.as_bytes())
            .unwrap_err()
            .to_string()
    }

    /// Returns a configuration with one pool and `rest`.
    fn with(rest: &str) -> String {
        format!(r#"{{"pools": [{{"name": "default"}}], {rest}}}"#)
    }

    #[test]
    fn the_least_configuration_has_every_default() {
        let config = FilterConfig::parse(br#"{"pools": [{"name": "default"}]}"#).unwrap();
        assert_eq!(
            config.pools,
            [PoolConfig {
                name: "default".into(),
                clusters: vec![]
            }]
        );
        assert_eq!(
            format!(
                "{:?}",
                FilterConfig {
                    pools: vec![],
                    ..config
                }
            ),
            format!("{:?}", FilterConfig::default())
        );
    }

    #[test]
    fn defaults_are_allowed_values() {
        let defaults = FilterConfig::default();
        for field in FIELDS {
            let value = match &field.kind {
                FieldKind::Number { get, .. } => ConfigValue::Number(get(&defaults)),
                FieldKind::Text { get, .. } => ConfigValue::Text(get(&defaults)),
                FieldKind::Flag { get, .. } => ConfigValue::Flag(get(&defaults)),
                FieldKind::Choice { get, .. } => ConfigValue::Text(get(&defaults).to_owned()),
            };
            assert!(
                field
                    .kind
                    .set(&mut FilterConfig::default(), value)
                    .is_some(),
                "{}",
                field.path
            );
        }
    }

    #[test]
    fn every_field_is_taken() {
        let config = FilterConfig::parse(
            br#"{"state": {"cluster": "c", "authority": "a", "transport": "http", "silence_max_ms": 1000, "backoff_max_ms": 100},
                 "pools": [{"name": "p", "clusters": ["x", "y"]}], "failure_mode": "open", "cold_start_wait_ms": 0,
                 "decide_at": "headers", "model_header": "x-m", "body_limit_bytes": 2048, "bodies_in_progress_bytes": 4096, "unread_reset_ms": 7, "destination_format": "single", "destination_header": "x-d", "fallback_header": "x-f",
                 "subset_namespace": "ns", "subset_key": "k", "ready_path": "/r", "explain": true, "decision_log_one_in": 50, "decision_log_headers": "x-a,x-b",
                 "client_header": "x-c", "cache_salt_key": "0123456789abcdef", "objective_header": "trust", "slo_headers": "trust", "fairness_namespace": "jwt", "fairness_key": "payload/sub", "fairness_header": "trust", "ttl_header": "x-t", "retry": false,
                 "per_try_timeout_ms": 9, "prefix_entries": 0, "lease_ms": 500, "sharing": false, "hold_headers": false,
                 "trace_tags": true}"#,
        )
        .unwrap();
        let settings = ExchangeSettings {
            destination: DestinationSettings {
                header: "x-d".into(),
                fallback_header: "x-f".into(),
                format: DestinationFormat::Single,
            },
            subset: SubsetSettings {
                namespace: "ns".into(),
                key: "k".into(),
            },
            decide_at: DecideAt::Headers,
            model_header: "x-m".into(),
            body_limit_bytes: 2048,
            unread_reset_ms: 7,
            failure_mode: FailureMode::Open,
            cold_start_wait_ms: 0,
            ready_path: "/r".into(),
            explain: true,
            client_header: "x-c".into(),
            cache_salt_key: "0123456789abcdef".into(),
            objective_header: HeaderTrust::Trust,
            slo_headers: HeaderTrust::Trust,
            flow: FlowRequestSettings {
                namespace: "jwt".into(),
                key: "payload/sub".into(),
                header: HeaderTrust::Trust,
                ttl_header: "x-t".into(),
            },
            decision_log: DecisionLogSettings {
                one_in: 50,
                headers: "x-a,x-b".into(),
            },
            retry: RetrySettings {
                enabled: false,
                per_try_timeout_ms: 9,
            },
        };
        let state = StateConfig {
            cluster: "c".into(),
            authority: "a".into(),
            transport: StateTransport::Http,
            silence_max_ms: 1000,
            backoff_max_ms: 100,
        };
        let pools = vec![PoolConfig {
            name: "p".into(),
            clusters: vec!["x".into(), "y".into()],
        }];
        let rest = FilterConfig {
            prefix_entries: 0,
            bodies_in_progress_bytes: 4096,
            lease_ms: 500,
            sharing: false,
            hold_headers: false,
            trace_tags: true,
            ..FilterConfig::default()
        };
        let expected = FilterConfig {
            state,
            pools,
            settings,
            ..rest
        };
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }

    #[test]
    fn errors_name_the_field_and_what_it_allows() {
        let cases = [
            ("{", "`configuration` must be JSON, and is not from byte 1 on".to_owned()),
            ("[]", "`configuration` must be an object".to_owned()),
            ("{}", "`pools` must be a list of 1 to 64 pools".to_owned()),
            (r#"{"pools": []}"#, "`pools` must be a list of 1 to 64 pools".to_owned()),
            (r#"{"pools": [{}]}"#, "`pools[0].name` must be text of 1 to 48 printable ASCII characters".to_owned()),
            (r#"{"pools": [{"name": "a b"}]}"#, "`pools[0].name` must be text of 1 to 48 printable ASCII characters".to_owned()),
            (r#"{"pools": [{"name": "a"}, {"name": "a"}]}"#, "`pools[1].name` must be another name: \"a\" is taken".to_owned()),
            (
                r#"{"pools": [{"name": "a", "clusters": ["c"]}, {"name": "b", "clusters": ["c"]}]}"#,
                "`pools[1].clusters` must be clusters of no other pool: \"c\" is taken".to_owned(),
            ),
            (r#"{"pools": [{"name": "a", "clusters": "c"}]}"#, "`pools[0].clusters` must be a list of at most 64 cluster names".to_owned()),
            (r#"{"pools": [{"name": "a", "cluster": "c"}]}"#, "`pools[0].cluster` must be left out: there is no such field".to_owned()),
            (&with(r#""": 2"#), "`` must be left out: there is no such field".to_owned()),
            (&with(r#""decide_at": "once""#), "`decide_at` must be \"body\" or \"headers\"".to_owned()),
            (&with(r#""failure_mode": "maybe""#), "`failure_mode` must be \"close\" or \"open\"".to_owned()),
            (&with(r#""cold_start_wait_ms": -1"#), "`cold_start_wait_ms` must be a whole number from 0 to 60000".to_owned()),
            (&with(r#""body_limit_bytes": 1e99"#), "`body_limit_bytes` must be a whole number from 1024 to 1073741824".to_owned()),
            (&with(r#""lease_ms": 1.5"#), "`lease_ms` must be a whole number from 500 to 60000".to_owned()),
            (&with(r#""explain": "yes""#), "`explain` must be true or false".to_owned()),
            (
                &with(r#""destination_header": "X-D""#),
                "`destination_header` must be a header name of 1 to 128 characters a-z, 0-9 and -".to_owned(),
            ),
            (
                &with(r#""ready_path": "ready""#),
                "`ready_path` must be a path of 1 to 128 printable ASCII characters that starts with / and has no ?".to_owned(),
            ),
            (&with(r#""state": {"cluster": ""}"#), "`state.cluster` must be text of 1 to 48 printable ASCII characters".to_owned()),
            (&with(r#""state": {"port": 1}"#), "`state.port` must be left out: there is no such field".to_owned()),
            (&with(r#""state": 7"#), "`state` must be an object".to_owned()),
            (&with(r#""failure_mod": "open""#), "`failure_mod` must be left out: there is no such field".to_owned()),
        ];
        for (json, expected) in cases {
            assert_eq!(error(json), expected, "{json}");
        }
    }

    #[test]
    fn the_reference_lists_every_field_once_with_its_default() {
        let text = reference();
        assert_eq!(text.lines().count(), FIELDS.len() + 1);
        assert!(
            text.contains("\nlease_ms (3000): a whole number from 500 to 60000: how long a VM leads without renewing its lease\n"),
            "{text}"
        );
        assert!(
            text.contains("\nfailure_mode (\"close\"): \"close\" or \"open\": "),
            "{text}"
        );
    }

    #[test]
    fn pools_are_found_by_cluster_and_by_name() {
        let config = FilterConfig::parse(
            br#"{"pools": [{"name": "a", "clusters": ["c1", "c2"]}, {"name": "b"}]}"#,
        )
        .unwrap();
        assert_eq!(
            (
                config.pool_of_cluster(b"c2"),
                config.pool_of_cluster(b"b"),
                config.pool_named(b"b")
            ),
            (Some(0), None, Some(1))
        );
        assert_eq!(config.only_pool(), None);
        assert_eq!(
            FilterConfig::parse(br#"{"pools": [{"name": "a"}]}"#)
                .unwrap()
                .only_pool(),
            Some(0)
        );
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            let _ = FilterConfig::parse(&bytes);
        }
    }
}
