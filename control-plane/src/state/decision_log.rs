//! Recent decisions that proxies sampled. Only complete records are kept
//! ([`exchange::record::DecisionRecord`]). Records contain no prompt and no hash of a prompt.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::state::peer::Origin;

/// The maximum number of decisions kept of one pool. An operator does not open more.
pub const SAMPLES_PER_POOL_MAX: usize = 40;

/// The longest record that is kept, in bytes: [`exchange::record::RECORDED_ENDPOINTS_MAX`]
/// endpoints with some adapters. With the limit above, a pool takes at most 10 MB.
const RECORD_BYTES_MAX: usize = 256 << 10;

/// The minimum time between two kept decisions of a pool. A record is parsed when it arrives. With
/// this limit, hundreds of workers cost no more than one.
const TAKEN_APART_MIN: Duration = Duration::from_millis(250);

/// The same if the last decision was another owner's. So an owner whose records arrive without end
/// leaves some time to others.
const OWNERS_APART_MIN: Duration = Duration::from_millis(125);

/// The maximum number of picked endpoints in a summary: as many as a ranked list normally has.
const PICKED_MAX: usize = 3;

/// The maximum number of characters of a model's name in a summary. Clients choose these names.
const MODEL_CHARS_MAX: usize = 256;

/// The sampled decisions of all pools.
#[derive(Debug, Default)]
pub struct DecisionLog {
    pools: Vec<PoolDecisions>,
    next_id: u64,
}

/// The sampled decisions of one pool, oldest first.
#[derive(Debug)]
struct PoolDecisions {
    pool: Arc<str>,
    kept: VecDeque<SampledDecision>,
    taken_at: Option<Instant>,
    /// The owner of the last record that was parsed.
    taken_of: Origin,
}

/// A decision that a proxy sampled.
#[derive(Clone, Debug)]
pub struct SampledDecision {
    /// The number of the decision, which grows with each decision.
    pub id: u64,
    pub pool: Arc<str>,
    /// The time when the daemon received the decision.
    pub at: SystemTime,
    /// The node id of the proxy, or `ext_proc`.
    pub source: String,
    /// The fields that the list of decisions shows.
    pub summary: DecisionSummary,
    pub record: Box<str>,
}

/// The fields of a decision that the list of decisions shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecisionSummary {
    pub model: String,
    /// Tokens of the prompt, as the proxy estimated them.
    pub prompt_tokens: u64,
    pub priority: i64,
    /// The number of endpoints of the pool.
    pub endpoints: usize,
    /// The maximum number of prompt tokens that an endpoint had cached, as the proxy estimated
    /// them.
    pub cached_tokens_max: u64,
    /// The picked endpoints in the order in which they are tried.
    pub picked: Vec<String>,
}

// === impl DecisionLog ===

impl DecisionLog {
    /// Keeps a decision of `pool` from a proxy of `origin`. Ignores a record that is invalid, too
    /// long, equal to the last record, or too soon after it.
    pub fn keep(
        &mut self,
        pool: &Arc<str>,
        source: &str,
        origin: &Origin,
        record: &str,
        now: Instant,
    ) {
        let at = self
            .pools
            .iter()
            .position(|known| known.pool == *pool)
            .unwrap_or_else(|| {
                self.pools.push(PoolDecisions {
                    pool: Arc::clone(pool),
                    kept: VecDeque::new(),
                    taken_at: None,
                    taken_of: Origin::default(),
                });
                self.pools.len() - 1
            });
        let Some(decisions) = self.pools.get_mut(at) else {
            return;
        };
        let owner = origin.owner();
        let apart_min = if decisions.taken_of == owner {
            TAKEN_APART_MIN
        } else {
            OWNERS_APART_MIN
        };
        let is_soon = decisions
            .taken_at
            .is_some_and(|taken| now.saturating_duration_since(taken) < apart_min);
        if is_soon
            || record.len() > RECORD_BYTES_MAX
            || decisions.kept.iter().any(|kept| *kept.record == *record)
        {
            return;
        }
        decisions.taken_at = Some(now);
        decisions.taken_of = owner;
        let Some(summary) = DecisionSummary::from_record(record) else {
            return;
        };
        self.next_id += 1;
        while decisions.kept.len() >= SAMPLES_PER_POOL_MAX {
            decisions.kept.pop_front();
        }
        decisions.kept.push_back(SampledDecision {
            id: self.next_id,
            pool: Arc::clone(pool),
            at: SystemTime::now(),
            source: source.to_owned(),
            summary,
            record: record.into(),
        });
    }

    /// Returns the decision with this number, if it is still kept.
    #[must_use]
    pub fn get(&self, id: u64) -> Option<&SampledDecision> {
        self.pools
            .iter()
            .flat_map(|decisions| &decisions.kept)
            .find(|kept| kept.id == id)
    }

    pub fn newest_first(&self) -> impl Iterator<Item = &SampledDecision> {
        let mut all: Vec<_> = self
            .pools
            .iter()
            .flat_map(|decisions| &decisions.kept)
            .collect();
        all.sort_by_key(|kept| std::cmp::Reverse(kept.id));
        all.into_iter()
    }
}

// === impl DecisionSummary ===

impl DecisionSummary {
    /// Reads a record; `None` if it is invalid.
    fn from_record(record: &str) -> Option<Self> {
        let value: serde_json::Value = serde_json::from_str(record).ok()?;
        value.get("rng")?;
        let request = &value["request"];
        let endpoints = value["endpoints"].as_array()?;
        let prompt_tokens = request["prompt_tokens"].as_u64()?;
        let block_tokens = request["block_tokens"].as_u64().unwrap_or(0);
        let matched = endpoints
            .iter()
            .filter_map(|row| row["matched_blocks"].as_u64())
            .max()
            .unwrap_or(0);
        Some(Self {
            model: request["model"]
                .as_str()?
                .chars()
                .take(MODEL_CHARS_MAX)
                .collect(),
            prompt_tokens,
            priority: request["priority"].as_i64().unwrap_or(0),
            endpoints: endpoints.len(),
            cached_tokens_max: matched.saturating_mul(block_tokens).min(prompt_tokens),
            picked: value["picked"]
                .as_array()?
                .iter()
                .filter_map(|name| name.as_str().map(str::to_owned))
                .take(PICKED_MAX)
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rng: u64) -> String {
        format!(
            r#"{{"rng":{rng},"request":{{"model":"m","priority":-1,"prompt_tokens":70,"blocks":4,"block_tokens":16}},
            "endpoints":[{{"matched_blocks":1}},{{"matched_blocks":3}}],"picked":["a:1","b:2"]}}"#
        )
    }

    #[test]
    fn new_valid_decisions_are_kept_and_the_oldest_go_first() {
        let mut log = DecisionLog::default();
        let pool = Arc::from("p");
        let one = Origin::default();
        let begin = Instant::now();
        for at in 0..SAMPLES_PER_POOL_MAX + 5 {
            let now = begin + TAKEN_APART_MIN * u32::try_from(at).unwrap();
            log.keep(&pool, "n", &one, &record(at as u64), now);
            log.keep(&pool, "n", &one, &record(at as u64 + 1_000), now); // too soon
        }
        let later = begin + TAKEN_APART_MIN * 1_000;
        log.keep(&pool, "n", &one, &record(44), later); // again
        log.keep(&pool, "n", &one, "{}", later);
        let ids: Vec<u64> = log.newest_first().map(|kept| kept.id).collect();
        assert_eq!(
            (ids.len(), ids[0], log.get(5).is_none()),
            (SAMPLES_PER_POOL_MAX, 45, true)
        );
        let expected = DecisionSummary {
            model: "m".to_owned(),
            prompt_tokens: 70,
            priority: -1,
            endpoints: 2,
            cached_tokens_max: 48,
            picked: vec!["a:1".to_owned(), "b:2".to_owned()],
        };
        assert_eq!(log.get(6).unwrap().summary, expected);
    }

    #[test]
    fn records_without_end_leave_time_to_another_owner() {
        let mut log = DecisionLog::default();
        let pool = Arc::from("p");
        let begin = Instant::now();
        let of = |last: u8| Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        };
        for ms in 0..2_000 {
            let now = begin + Duration::from_millis(ms);
            log.keep(&pool, "hostile", &of(2), "{}", now);
            log.keep(&pool, "honest", &of(1), &record(ms), now);
        }
        let kept = log.newest_first().count();
        assert_eq!(kept, 8, "before, none was kept");
    }

    #[test]
    fn a_long_record_is_ignored() {
        let mut log = DecisionLog::default();
        let pool = Arc::from("p");
        log.keep(
            &pool,
            "n",
            &Origin::default(),
            &format!("{}{}", record(1), " ".repeat(RECORD_BYTES_MAX)),
            Instant::now(),
        );
        assert_eq!(log.newest_first().count(), 0);
    }
}
