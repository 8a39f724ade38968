//! The reasons why a pool gives no endpoint for a request.

use scheduler::{Decision, UnavailableReason};

use crate::queues::QueueRefusal;

/// The reason why a [`ManagedPool`](crate::ManagedPool) refuses a request. The host turns it into a
/// reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PickRefusal {
    /// The pool has no state yet.
    NoState,
    /// The prompt cost two engines their connection within a minute, while other prompts succeeded
    /// there.
    CrashingPrompt,
    /// The pool does not know this model.
    UnknownModel(Box<str>),
    /// The request was held, or would have to be held, and is refused.
    Queue(QueueRefusal),
    /// The scheduler decided not to route the request.
    Decision(Decision),
}

impl PickRefusal {
    /// Whether the pool has no ready endpoint.
    pub(crate) fn is_without_endpoints(&self) -> bool {
        matches!(
            self,
            Self::Decision(Decision::Unavailable(UnavailableReason::NoReadyEndpoint))
        )
    }

    /// Whether waiting cannot change the refusal, even in a pool that scales from zero: only
    /// another request, or a change of the pool, can.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::CrashingPrompt
            | Self::UnknownModel(_)
            | Self::Decision(Decision::UnknownProfile(_)) => true,
            Self::Decision(Decision::Unavailable(why)) => {
                *why != UnavailableReason::NoReadyEndpoint
            }
            _ => false,
        }
    }
}
