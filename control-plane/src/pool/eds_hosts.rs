//! The endpoints that Envoy has as hosts: all, unless the pipeline splits requests by role. Then
//! endpoints that only encode or prefill are called by other sidecars and are no destination for
//! the proxy.
//!
//! A new pipeline that needs more hosts gets them at once, and the pool update waits for EDS as for
//! any new endpoint. One that needs fewer removes them like departed endpoints, because a proxy may
//! still schedule by the previous pipeline.

use std::time::Duration;

use discovery::Instance;
use scheduler::{Pipeline, PipelineSpec, ROLE_LABEL, decodes};
use tokio::time::Instant;

use super::writer::{ACK_WAIT_MAX, EDS_REMOVAL_GRACE};

/// Which endpoints are hosts.
#[derive(Debug)]
pub(super) struct HostSelection {
    /// Whether only endpoints that decode are hosts, by the current pipeline.
    decoders_only: bool,
    /// Until when all are hosts: until every proxy has the pool update of this revision.
    all_until: Option<(Instant, u64)>,
}

// === impl HostSelection ===

impl HostSelection {
    pub(super) fn of(pipeline: &PipelineSpec) -> Self {
        Self { decoders_only: disaggregates(pipeline), all_until: None }
    }

    /// A new pipeline is in force from the pool update of `revision` on.
    pub(super) fn follow(&mut self, pipeline: &PipelineSpec, revision: u64, now: Instant) {
        let decoders_only = disaggregates(pipeline);
        if decoders_only && !self.decoders_only {
            self.all_until = Some((now, revision));
        } else if !decoders_only {
            self.all_until = None;
        }
        self.decoders_only = decoders_only;
    }

    /// Returns whether there are fewer hosts from now on.
    pub(super) fn settle(&mut self, acknowledged: impl Fn(u64) -> bool, now: Instant) -> bool {
        let done = self.all_until.is_some_and(|(at, revision)| is_over(now.saturating_duration_since(at), || acknowledged(revision)));
        if done {
            self.all_until = None;
        }
        done
    }

    pub(super) fn is_settled(&self) -> bool {
        self.all_until.is_none()
    }

    pub(super) fn admits(&self, instance: &Instance) -> bool {
        let role = instance.labels.iter().find(|(key, _)| key == ROLE_LABEL).map(|(_, role)| role.as_str());
        !self.decoders_only || self.all_until.is_some() || decodes(role)
    }
}

/// May what left the pool update so long ago leave EDS, too?
pub(super) fn is_over(elapsed: Duration, acknowledged: impl FnOnce() -> bool) -> bool {
    elapsed >= EDS_REMOVAL_GRACE && (elapsed >= ACK_WAIT_MAX || acknowledged())
}

fn disaggregates(pipeline: &PipelineSpec) -> bool {
    Pipeline::build(pipeline).is_ok_and(|pipeline| pipeline.disaggregates())
}
