//! Decides which model names get a label in metrics.
//!
//! A name gets a label at its first success. Engines that ignore the name answer for any name. So
//! if all labels are taken, a name that nothing lists ([`LabelSource`]) is replaced by
//!
//! - a listed name,
//! - a name of a client with fewer names,
//! - a name of the same client with twice as many requests, or
//! - any name, if the replaced name had no success for [`IDLE_MS`].
//!
//! The counts of the replaced name are added to `other`.

use scheduler::Timestamp;

use super::{CountedRequest, MODELS_MAX, ModelCounters, ModelLabel, PoolCounters, other};

/// The maximum length of an unlisted model name, in bytes. The rest is cut, because each name is
/// written into some 90 lines of the daemon's `/metrics` page.
pub const UNLISTED_NAME_BYTES_MAX: usize = 64;

/// How long an unlisted name without a success keeps its label, in ms: long enough for some scrapes
/// by Prometheus.
const IDLE_MS: u64 = 600_000;

/// The source of a model name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LabelSource {
    /// Discovery, an object, metadata, or an engine lists the name. Switchpoint's own label `other`
    /// also counts as listed.
    #[default]
    Listed,
    /// Only clients' requests name the model.
    Client {
        /// The client whose request came first, as a hash.
        client: u64,
        /// The time when a request for this name last succeeded.
        used_at: Timestamp,
    },
}

/// The successes of unlisted names without a label, as hashes with counts. A name that is used
/// repeatedly stays in this list, while names that are used once leave it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NameCandidates([(u64, u64); CANDIDATES]);

/// A real name keeps its count if clients invent fewer names than this between two requests for it.
const CANDIDATES: usize = 16;

// === impl LabelSource ===

impl LabelSource {
    /// The client that named the model, if nothing lists it.
    fn client(self) -> Option<u64> {
        match self {
            Self::Listed => None,
            Self::Client { client, .. } => Some(client),
        }
    }
}

// === impl NameCandidates ===

impl NameCandidates {
    /// Counts a success of this label, and returns how many successes it had recently.
    fn count(&mut self, label: &ModelLabel) -> u64 {
        let name = scheduler::name_hash(&label.model)
            ^ scheduler::name_hash(&label.target_model).rotate_left(1);
        let known = self.0.iter().position(|(known, _)| *known == name);
        // Of the names with the fewest successes, the oldest is replaced.
        let fewest = || self.0.iter().map(|(_, count)| *count).min().unwrap_or(0);
        let place = known.or_else(|| {
            let fewest = fewest();
            self.0.iter().position(|(_, count)| *count == fewest)
        });
        let Some(place) = place else { return 0 };
        let count = if known.is_some() {
            self.0.get(place).map_or(0, |(_, count)| *count)
        } else {
            0
        };
        if let Some(rows) = self.0.get_mut(place..) {
            rows.rotate_left(1);
        }
        if let Some(newest) = self.0.last_mut() {
            *newest = (name, count + 1);
        }
        count + 1
    }
}

// === impl PoolCounters ===

impl PoolCounters {
    /// Counts the success (2xx) of a request. `source` is the source of the name, if the name has
    /// no label.
    pub fn count_success(&mut self, counted: &mut CountedRequest, source: LabelSource) {
        if !counted.named {
            self.name(counted, source);
        }
    }

    /// Keeps the label of an unlisted name for longer.
    pub(crate) fn renew(&mut self, counted: &CountedRequest, now: Timestamp) {
        let row = self.models.iter_mut().find(|m| m.label == counted.label);
        if let Some(LabelSource::Client { used_at, .. }) = row.map(|row| &mut row.source) {
            *used_at = now;
        }
    }

    pub(super) fn position(&self, label: &ModelLabel) -> Option<usize> {
        self.models.iter().position(|m| m.label == *label)
    }

    /// Whether there is no room for another label. The row of `other` does not take up room.
    pub(super) fn is_full(&self) -> bool {
        self.models.len() > MODELS_MAX
            || (self.models.len() == MODELS_MAX && self.position(&other()).is_none())
    }

    /// The row that is replaced by a new name, if there is one.
    fn giving_way(&self, to: LabelSource) -> Option<usize> {
        let of = |wanted: u64| {
            let is_of = |row: &&ModelCounters| row.source.client() == Some(wanted);
            self.models.iter().filter(is_of).count()
        };
        let unlisted = self
            .models
            .iter()
            .enumerate()
            .filter_map(|(at, row)| match row.source {
                LabelSource::Client { client, used_at } => Some((at, client, used_at)),
                LabelSource::Listed => None,
            });
        match to {
            LabelSource::Listed => unlisted.min_by_key(|(_, _, used_at)| *used_at),
            LabelSource::Client {
                client,
                used_at: now,
            } => {
                let own = of(client);
                unlisted
                    .filter(|(_, other, used_at)| {
                        now.ms_since(*used_at) >= IDLE_MS || of(*other) > own + 1
                    })
                    .min_by_key(|(_, _, used_at)| *used_at)
            }
        }
        .map(|(at, ..)| at)
    }

    /// Counts a success of a name without a label. Returns the unlisted row of its client with the
    /// fewest requests, if the name had at least twice as many successes.
    fn rarer_than(&mut self, label: &ModelLabel, source: LabelSource) -> Option<usize> {
        let successes = self.candidates.count(label);
        let rows = self.models.iter().enumerate();
        let client = source.client()?;
        let own = rows.filter(|(_, row)| row.source.client() == Some(client));
        let (rarest, row) = own.min_by_key(|(_, row)| row.requests)?;
        (2 * row.requests <= successes).then_some(rarest)
    }

    /// Gives the request's model a label, if there is room or another name is replaced.
    #[cold]
    fn name(&mut self, counted: &mut CountedRequest, source: LabelSource) {
        if matches!(source, LabelSource::Client { .. })
            && let Some(cut) = counted.label.cut()
        {
            counted.label = cut;
        }
        counted.named = true;
        let known = self.position(&counted.label).is_some();
        let giving_way = if !known && self.is_full() {
            self.giving_way(source)
                .or_else(|| self.rarer_than(&counted.label, source))
        } else {
            None
        };
        let removed = giving_way.map(|at| self.models.swap_remove(at));
        self.begin(counted);
        if let Some(at) = self.position(&counted.label).filter(|_| !known)
            && let Some(row) = self.models.get_mut(at)
        {
            row.source = source;
        }
        if let Some(removed) = removed {
            self.row(None).merge(&removed);
        }
    }
}

// === impl ModelLabel ===

impl ModelLabel {
    /// The label with both names cut to [`UNLISTED_NAME_BYTES_MAX`], for an unlisted model. `None`
    /// if neither name is longer.
    pub(super) fn cut(&self) -> Option<Self> {
        let cut = |name: &str| {
            name.get(..name.floor_char_boundary(UNLISTED_NAME_BYTES_MAX))
                .unwrap_or_default()
                .into()
        };
        let is_long = |name: &str| name.len() > UNLISTED_NAME_BYTES_MAX;
        (is_long(&self.model) || is_long(&self.target_model)).then(|| Self {
            model: cut(&self.model),
            target_model: cut(&self.target_model),
            priority: self.priority,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(client: u64, ms: u64) -> LabelSource {
        LabelSource::Client {
            client,
            used_at: Timestamp(0).plus_ms(ms),
        }
    }

    /// Sends one client's requests for these models, one millisecond apart. All succeed.
    fn serve(counters: &mut PoolCounters, client: u64, models: impl IntoIterator<Item = String>) {
        for (ms, model) in (0..).zip(models) {
            let mut counted = counters.count_sent(&model, &model, 0, 1);
            counters.count_success(&mut counted, of(client, ms));
            counters.count_ended(&counted);
        }
    }

    fn row<'c>(counters: &'c PoolCounters, model: &str) -> Option<&'c ModelCounters> {
        counters.models().iter().find(|m| *m.label.model == *model)
    }

    #[test]
    fn a_listed_model_has_its_row_however_many_were_invented() {
        let mut counters = PoolCounters::default();
        serve(&mut counters, 1, (0..300).map(|n| format!("invented-{n}")));
        let mut counted = counters.count_sent("real", "real", 0, 1);
        counters.count_success(&mut counted, LabelSource::Listed);
        counters.count_ended(&counted);
        assert_eq!(row(&counters, "real").map(|m| m.requests), Some(1));
        serve(&mut counters, 2, (0..300).map(|n| format!("more-{n}")));
        assert_eq!(row(&counters, "real").map(|m| m.requests), Some(1));
        assert!(counters.models().len() <= MODELS_MAX + 1);
        let total: u64 = counters.models().iter().map(|m| m.requests).sum();
        assert_eq!(total, 601, "each request counts once");
    }

    #[test]
    fn a_client_with_fewer_names_gets_its_row_and_one_alone_may_use_all() {
        let mut counters = PoolCounters::default();
        serve(&mut counters, 1, (0..99).map(|n| format!("a-{n}")));
        assert_eq!(counters.models().len(), 99, "alone, it has what it needs");
        serve(&mut counters, 1, (0..300).map(|n| format!("b-{n}")));
        serve(&mut counters, 2, ["real".to_owned()]);
        assert_eq!(row(&counters, "real").map(|m| m.requests), Some(1));
        serve(&mut counters, 1, (0..300).map(|n| format!("c-{n}")));
        assert!(row(&counters, "real").is_some());
        serve(&mut counters, 2, (0..300).map(|n| format!("d-{n}")));
        let own = |client: u64| {
            let rows = counters.models().iter();
            rows.filter(
                |m| matches!(m.source, LabelSource::Client { client: of, .. } if of == client),
            )
            .count()
        };
        assert!(own(1).abs_diff(own(2)) <= 2, "{} and {}", own(1), own(2));
    }

    #[test]
    fn no_name_takes_the_place_of_another_clients_name_however_often_it_is_used() {
        let mut counters = PoolCounters::default();
        serve(&mut counters, 1, (0..50).map(|n| format!("real-{n}")));
        serve(&mut counters, 2, (0..300).map(|n| format!("invented-{n}")));
        serve(&mut counters, 2, (0..500).map(|_| "often".to_owned()));
        let real = (0..50).filter(|n| row(&counters, &format!("real-{n}")).is_some());
        assert_eq!(real.count(), 50);
        assert!(row(&counters, "often").is_some(), "it replaced an own name");
    }

    #[test]
    fn a_name_that_is_used_takes_the_place_of_one_that_was_invented() {
        let mut counters = PoolCounters::default();
        serve(&mut counters, 1, (0..300).map(|n| format!("invented-{n}")));
        for n in 0..20 {
            serve(&mut counters, 1, (0..8).map(|m| format!("more-{n}-{m}")));
            serve(&mut counters, 1, ["real".to_owned()]);
        }
        assert_eq!(row(&counters, "real").map(|m| m.requests), Some(19));
        let invented = counters.models().iter().filter(|m| m.requests == 1);
        assert_eq!(invented.count(), 99, "one gave way");
    }

    #[test]
    fn an_unlisted_name_is_cut_and_gives_way_when_it_is_idle() {
        let mut counters = PoolCounters::default();
        let long = "é".repeat(120);
        serve(&mut counters, 1, [long.clone(), long]);
        assert_eq!(counters.models().len(), 1);
        assert_eq!(counters.models()[0].requests, 2);
        assert_eq!(&*counters.models()[0].label.model, "é".repeat(32));
        serve(&mut counters, 1, (0..200).map(|n| format!("a-{n}")));
        let mut counted = counters.count_sent("late", "late", 0, 1);
        counters.count_success(&mut counted, of(1, IDLE_MS + 10_000));
        assert_eq!(row(&counters, "late").map(|m| m.running), Some(1));
        counters.count_ended(&counted);
        assert_eq!(row(&counters, "late").map(|m| m.running), Some(0));
    }

    #[test]
    fn a_request_whose_row_gave_way_ends_where_its_counts_are() {
        let mut counters = PoolCounters::default();
        let mut first = counters.count_sent("first", "first", 0, 1);
        counters.count_success(&mut first, of(1, 0));
        serve(&mut counters, 1, (1..101).map(|n| format!("a-{n}")));
        let mut counted = counters.count_sent("real", "real", 0, 1);
        counters.count_success(&mut counted, LabelSource::Listed);
        assert!(row(&counters, "first").is_none());
        counters.count_ended(&first);
        counters.count_ended(&counted);
        let running: u64 = counters.models().iter().map(|m| m.running).sum();
        assert_eq!(running, 0);
    }

    #[test]
    fn names_from_clients_cannot_grow_without_bound() {
        let mut counters = PoolCounters::default();
        for i in 0..10_000 {
            let model = format!("m{i}");
            let mut counted = counters.count_sent(&model, &model, i, 0);
            assert_eq!(
                (&*counted.label.model, counted.label.priority),
                (&*model, i),
                "a request keeps its own name"
            );
            counters.count_success(&mut counted, of(1, 0));
            counters.count_ended(&counted);
        }
        assert!((MODELS_MAX..=MODELS_MAX + 1).contains(&counters.models().len()));
        assert_eq!(
            counters.models().iter().map(|m| m.requests).sum::<u64>(),
            10_000
        );
        assert_eq!(
            counters
                .models()
                .iter()
                .find(|m| &*m.label.model == "m5")
                .map(|m| (m.requests, m.running)),
            Some((1, 0))
        );
        assert_eq!(
            &*counters.count_sent(&"x".repeat(1000), "", 0, 0).label.model,
            "other"
        );
    }

    #[test]
    fn names_that_no_engine_serves_use_up_no_labels() {
        let mut counters = PoolCounters::default();
        for i in 0..10_000 {
            let counted = counters.count_sent(&format!("invented-{i}"), "", 0, 3);
            counters.count_ended(&counted).error(404);
        }
        let mut counted = counters.count_sent("real", "real", 0, 5);
        assert_eq!(
            counters
                .models()
                .iter()
                .map(|m| &*m.label.model)
                .collect::<Vec<_>>(),
            ["other"]
        );
        counters.count_success(&mut counted, of(1, 0));
        let again = counters.count_sent("real", "real", 0, 7);
        counters.count_ended(&counted);
        counters.count_ended(&again).error(500);
        let rows: Vec<_> = counters
            .models()
            .iter()
            .map(|m| {
                (
                    &*m.label.model,
                    m.requests,
                    m.request_bytes,
                    m.running,
                    m.errors.len(),
                )
            })
            .collect();
        assert_eq!(
            rows,
            [("other", 10_000, 30_000, 0, 1), ("real", 2, 12, 0, 1)],
            "each request counts once"
        );
    }
}
