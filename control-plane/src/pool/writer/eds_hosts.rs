//! The endpoints that Envoy gets as hosts. Envoy gets all endpoints, unless the pipeline splits
//! requests by role. In that case, the endpoints that only encode or prefill are no hosts, because
//! sidecars call them and the proxy does not.
//!
//! A new pipeline that needs more hosts gets these hosts immediately; the pool update waits for EDS
//! as for any new endpoint. A new pipeline that needs fewer hosts removes them like departed
//! endpoints, because a proxy may still use the old pipeline.

use std::time::Duration;

use discovery::Instance;
use scheduler::{Pipeline, PipelineSpec, ROLE_LABEL, decodes};
use tokio::time::Instant;

use super::{ACK_WAIT_MAX, EDS_REMOVAL_GRACE};

/// Decides which endpoints are hosts.
#[derive(Debug)]
pub(super) struct HostSelection {
    /// Whether the current pipeline needs as hosts only the endpoints that decode.
    decoders_only: bool,
    /// While all endpoints stay hosts: the time of the pipeline that needs fewer hosts, and the
    /// pool update that every proxy must have before some endpoints stop being hosts.
    all_until: Option<(Instant, u64)>,
}

// === impl HostSelection ===

impl HostSelection {
    pub(super) fn from_pipeline(pipeline: &PipelineSpec) -> Self {
        Self {
            decoders_only: disaggregates(pipeline),
            all_until: None,
        }
    }

    /// Applies a new pipeline, which is in force from the pool update of `revision` on.
    pub(super) fn follow(&mut self, pipeline: &PipelineSpec, revision: u64, now: Instant) {
        let decoders_only = disaggregates(pipeline);
        if decoders_only && !self.decoders_only {
            self.all_until = Some((now, revision));
        } else if !decoders_only {
            self.all_until = None;
        }
        self.decoders_only = decoders_only;
    }

    /// Ends the wait for proxies when every proxy has the pool update, or the time is over. Returns
    /// whether there are fewer hosts now.
    pub(super) fn settle(&mut self, acknowledged: impl Fn(u64) -> bool, now: Instant) -> bool {
        let done = self.all_until.is_some_and(|(at, revision)| {
            is_over(now.saturating_duration_since(at), || acknowledged(revision))
        });
        if done {
            self.all_until = None;
        }
        done
    }

    pub(super) fn is_settled(&self) -> bool {
        self.all_until.is_none()
    }

    pub(super) fn admits(&self, instance: &Instance) -> bool {
        let role = instance
            .labels
            .iter()
            .find(|(key, _)| key == ROLE_LABEL)
            .map(|(_, role)| role.as_str());
        !self.decoders_only || self.all_until.is_some() || decodes(role)
    }
}

/// Returns whether an endpoint that left the pool update `elapsed` ago may leave EDS too.
pub(super) fn is_over(elapsed: Duration, acknowledged: impl FnOnce() -> bool) -> bool {
    elapsed >= EDS_REMOVAL_GRACE && (elapsed >= ACK_WAIT_MAX || acknowledged())
}

fn disaggregates(pipeline: &PipelineSpec) -> bool {
    Pipeline::build(pipeline).is_ok_and(|pipeline| pipeline.disaggregates())
}
