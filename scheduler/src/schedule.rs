//! Filter, score, pick: all the control flow of scheduling.

use crate::candidates::Candidates;
use crate::decision::{Decision, Explanation, Unavailable};
use crate::local::Local;
use crate::request::Request;
use crate::rng::Rng;
use crate::snapshot::Snapshot;

/// Picks endpoints for `request` by the snapshot's profile. Mutates nothing but `rng`: the caller records the outcome.
///
/// `explanation`, when given, is filled with who was dropped by whom and each scorer's scores; when not, reasons cost nothing.
#[must_use]
pub fn schedule(
    snapshot: &Snapshot,
    request: &Request<'_>,
    local: Local<'_>,
    rng: &mut Rng,
    explanation: Option<&mut Explanation>,
) -> Decision {
    let _ = (snapshot, request, local, rng, explanation, Candidates::default());
    Decision::Unavailable(Unavailable::NoReadyEndpoint)
}
