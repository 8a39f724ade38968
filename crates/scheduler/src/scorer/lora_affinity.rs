//! `lora-affinity-scorer`: prefers endpoints that have loaded the request's adapter, then endpoints
//! with room for this adapter.
//!
//! An engine reports only the adapters in use at the moment of the scrape. Between two requests for
//! an adapter, the engine does not report the adapter, although the adapter is still in memory.
//! With these reports alone, every request of a rare adapter would be sent to an endpoint that has
//! to load it, and would evict an adapter that is needed next. So the scorer also uses the adapters
//! of past requests ([`AdapterRoom`]). An adapter stays at the endpoint at which it was used last.
//! If an adapter must be evicted, the scorer chooses the adapter that the pool has not used for
//! longest.

use crate::endpoint::EndpointIndex;
use crate::local_state::AdapterRoom;
use crate::metrics::LoraMetrics;
use crate::plugin::{Context, RequiredState, Scorer, readable};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::{rate, share_before};
use crate::sort::sort_by;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "lora-affinity-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "1 where the requested adapter runs, or was placed before and cannot have been evicted \
        since; 0.8 where an adapter slot is free; 0.6 where the adapter waits; where it would \
        evict an idle adapter: 0.5 * (1 - r / (n - 1)), r = how many of the n candidates without \
        a free slot have an adapter that is idle for longer; else 0.",
    ),
    source: readable("llm-d-router, scorer/loraaffinity; the eviction rule is Switchpoint's"),
    parameters: &[],
    needs: &[RequiredState::Adapters, RequiredState::AdapterRooms],
    build: |_| Ok(Plugin::Scorer(Box::new(LoraAffinityScorer))),
};

const LOADED: f32 = 1.0;
const ROOM: f32 = 0.8;
const WAITING: f32 = 0.6;
/// The maximum score of an endpoint that must evict an adapter. This score is below [`WAITING`],
/// because to wait in a queue costs less than two loads: of the request's adapter now, and of the
/// evicted adapter later.
const DISPLACING_MAX: f32 = 0.5;
const FULL: f32 = 0.0;

#[derive(Debug)]
struct LoraAffinityScorer;

/// The state of one adapter in the engine's report.
#[derive(Clone, Copy)]
enum AdapterReport {
    Running,
    Room,
    Waiting,
    Full,
}

// === impl AdapterReport ===

impl AdapterReport {
    fn from_metrics(model: &str, lora: &LoraMetrics) -> Self {
        let lists = |adapters: &[Box<str>]| adapters.iter().any(|adapter| **adapter == *model);
        if lists(&lora.running) {
            Self::Running
        } else if lora.running.len() + lora.waiting.len()
            < usize::try_from(lora.max).unwrap_or(usize::MAX)
        {
            Self::Room
        } else if lists(&lora.waiting) {
            Self::Waiting
        } else {
            Self::Full
        }
    }
}

/// Returns the score of an endpoint. `displaced` has, for each candidate that would evict an
/// adapter, the last use of that adapter. These numbers are sorted.
fn score(report: Option<AdapterReport>, room: AdapterRoom, displaced: &[u64]) -> Option<f32> {
    Some(match (report, room) {
        (None, AdapterRoom::Unknown) => return None,
        (Some(AdapterReport::Running), _) | (_, AdapterRoom::Loaded) => LOADED,
        (Some(AdapterReport::Waiting), _) => WAITING,
        (Some(AdapterReport::Full), _) => FULL,
        (_, AdapterRoom::Full { displaced_used }) => {
            DISPLACING_MAX * (1.0 - share_before(displaced, displaced_used))
        }
        (_, AdapterRoom::Free | AdapterRoom::Unknown) => ROOM,
    })
}

impl Scorer for LoraAffinityScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        let moment = |&endpoint: &EndpointIndex| match context.local.adapter_room(endpoint) {
            AdapterRoom::Full { displaced_used } => Some(displaced_used),
            _ => None,
        };
        let mut displaced: Vec<u64> = endpoints.iter().filter_map(moment).collect();
        sort_by(&mut displaced, |a, b| a < b);
        rate(endpoints, scores, |endpoint| {
            let lora = context
                .metrics(endpoint)
                .and_then(|metrics| metrics.lora.as_ref());
            score(
                lora.map(|lora| AdapterReport::from_metrics(context.request.model, lora)),
                context.local.adapter_room(endpoint),
                &displaced,
            )
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(running: &[&str], waiting: &[&str], max: u32) -> f32 {
        let boxed = |names: &[&str]| names.iter().map(|&n| n.into()).collect();
        let lora = LoraMetrics {
            running: boxed(running),
            waiting: boxed(waiting),
            max,
            base_models: [].into(),
        };
        score(
            Some(AdapterReport::from_metrics("sql", &lora)),
            AdapterRoom::Unknown,
            &[],
        )
        .unwrap()
    }

    #[test]
    fn running_room_waiting_full() {
        assert_eq!(
            rate(&["chat", "sql"], &[], 2),
            LOADED,
            "running counts even where nothing more fits"
        );
        assert_eq!(rate(&["chat"], &[], 2), ROOM);
        assert_eq!(
            rate(&["chat"], &["sql"], 3),
            ROOM,
            "room comes before waiting, as in the reference"
        );
        assert_eq!(rate(&["chat"], &["sql"], 2), WAITING);
        assert_eq!(rate(&["chat"], &["code"], 2), FULL);
        assert_eq!(rate(&[], &[], 0), FULL);
        assert_eq!(
            rate(&["sql-v2", "SQL"], &[], 2),
            FULL,
            "names are compared whole"
        );
    }

    #[test]
    fn adapters_of_past_requests_count_between_reports() {
        let full = |displaced_used| AdapterRoom::Full { displaced_used };
        let displaced = [3, 5, 9];
        assert_eq!(
            score(Some(AdapterReport::Room), AdapterRoom::Loaded, &displaced),
            Some(LOADED),
            "idle adapters are in no report"
        );
        assert_eq!(
            score(Some(AdapterReport::Full), AdapterRoom::Loaded, &displaced),
            Some(LOADED),
            "it was given just now"
        );
        assert_eq!(
            [3, 5, 9].map(|used| score(Some(AdapterReport::Room), full(used), &displaced)),
            [Some(0.5), Some(0.25), Some(0.0)]
        );
        assert_eq!(
            score(Some(AdapterReport::Room), full(3), &[3]),
            Some(DISPLACING_MAX)
        );
        assert_eq!(
            score(Some(AdapterReport::Waiting), full(3), &[3]),
            Some(WAITING)
        );
        assert_eq!(
            score(Some(AdapterReport::Full), full(3), &[3]),
            Some(FULL),
            "nothing there is idle"
        );
        assert_eq!(
            score(Some(AdapterReport::Room), AdapterRoom::Free, &[]),
            Some(ROOM)
        );
    }

    #[test]
    fn without_a_report_only_past_adapters_count() {
        assert_eq!(score(None, AdapterRoom::Unknown, &[]), None);
        assert_eq!(score(None, AdapterRoom::Loaded, &[]), Some(LOADED));
        assert_eq!(score(None, AdapterRoom::Free, &[]), Some(ROOM));
        assert_eq!(
            score(None, AdapterRoom::Full { displaced_used: 1 }, &[1]),
            Some(DISPLACING_MAX)
        );
    }
}
