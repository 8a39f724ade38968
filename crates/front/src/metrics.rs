//! All metrics of the pickers inside Envoy, in one table. No name contains text of a request or an
//! endpoint, because the proxy never frees a name.

use scheduler::plugin::readable;

/// The kind of a statistic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A statistic whose value only rises.
    Counter = 0,
    /// A statistic whose value can rise and fall.
    Gauge = 1,
    /// A statistic that counts values by their size.
    Histogram = 2,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DefinedMetric {
    pub name: &'static str,
    pub kind: MetricKind,
    about: &'static str,
}

macro_rules! metrics {
    ($($id:ident: $kind:ident $name:literal, $about:literal;)+) => {
        /// The name of a metric in the code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Stat { $(#[doc = $about] $id,)+ }

        /// The table of metrics, in the order of [`Stat`].
        pub const METRICS: &[DefinedMetric] = &[$(DefinedMetric { name: $name, kind: MetricKind::$kind, about: readable($about) },)+];
    };
}

metrics! {
    Picked: Counter "switchpoint_picked_total", "Requests sent to a picked endpoint.";
    FailedOpen: Counter "switchpoint_failed_open_total", "Requests sent to any endpoint, because there was no state.";
    Passed: Counter "switchpoint_passed_total", "Requests on routes without a pool.";
    Parked: Counter "switchpoint_parked_total", "Requests held until there was state.";
    Held: Counter "switchpoint_held_total", "Requests held by flow control until their endpoint had room.";
    Invalid: Counter "switchpoint_refused_invalid_total", "Requests refused because they are invalid (4xx).";
    Shed: Counter "switchpoint_refused_shed_total", "Requests refused by policy (429).";
    Unavailable: Counter "switchpoint_refused_unavailable_total", "Requests refused because no endpoint can serve them (503).";
    Unread: Counter "switchpoint_unread_total", "Requests whose place was freed before their end, because after 5 s the body was incomplete, or the client had read too little of the reply.";
    FailedAttempts: Counter "switchpoint_failed_attempts_total", "Attempts at an endpoint that failed before a response.";
    PickUs: Histogram "switchpoint_pick_us", "Time from the last byte of a request to its decision, in µs.";
    TtftMs: Histogram "switchpoint_ttft_ms", "Time from pick to first token of streamed responses, in ms.";
    PromptTokens: Counter "switchpoint_prompt_tokens_total", "Prompt tokens that engines reported.";
    CachedTokens: Counter "switchpoint_cached_tokens_total", "Prompt tokens that engines reported as cached.";
    CompletionTokens: Counter "switchpoint_completion_tokens_total", "Output tokens that engines reported.";
    EstimatedTokens: Counter "switchpoint_estimated_completion_tokens_total", "Output tokens counted by events, because engines reported none.";
    PlacementsLost: Counter "switchpoint_placements_lost_total", "Ring segments of other workers that were overwritten before they were read.";
    ShareDelayUs: Histogram "switchpoint_share_delay_us", "Delay until other proxies receive a change, in µs, estimated from the round trip.";
    PoolUpdatesApplied: Counter "switchpoint_state_pool_updates_total", "Pool updates of the daemon that were applied.";
    MetricsApplied: Counter "switchpoint_state_metrics_total", "Metrics of the daemon that were applied.";
    LearnedApplied: Counter "switchpoint_state_learned_total", "Learned models of the daemon that were applied.";
    Refused: Counter "switchpoint_state_refused_total", "Messages of the daemon that were refused.";
    CrashGuarded: Counter "switchpoint_state_crash_guarded_total", "Messages refused because a VM was lost while it decoded them.";
    StreamsOpened: Counter "switchpoint_state_streams_total", "Streams opened to the daemon.";
    LeadersElected: Counter "switchpoint_state_leaders_total", "Times a VM became leader.";
    Connected: Gauge "switchpoint_state_connected", "Whether the daemon is connected: 1 or 0.";
    AgeMs: Gauge "switchpoint_state_age_ms", "Time since the last message of the daemon, in ms.";
    Endpoints: Gauge "switchpoint_state_endpoints", "Endpoints in all pools.";
    WithoutVmSlot: Gauge "switchpoint_vms_without_vm_slot", "Worker VMs that pick by their own state only, because all VM slots are taken.";
    HostErrors: Counter "switchpoint_host_errors_total", "Calls that the proxy refused although it should not.";
}

/// Returns the reference of the statistics, a line for each statistic.
#[must_use]
pub fn reference() -> String {
    METRICS
        .iter()
        .map(|DefinedMetric { name, kind, about }| format!("{name} ({kind:?}): {about}\n"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_ours_and_distinct() {
        let mut names: Vec<_> = METRICS.iter().map(|m| m.name).collect();
        assert!(names.iter().all(|n| n.starts_with("switchpoint_")
            && n.bytes().all(|b| b.is_ascii_lowercase() || b == b'_')));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
        assert_eq!(reference().lines().count(), METRICS.len());
    }

    #[test]
    fn counters_end_in_total() {
        assert!(
            METRICS
                .iter()
                .all(|m| (m.kind == MetricKind::Counter) == m.name.ends_with("_total"))
        );
    }
}
