//! The ledger of what this proxy has outstanding, by endpoint slot.

use crate::snapshot::EndpointRef;

/// What one endpoint has outstanding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests picked and not ended.
    pub requests: u32,
    /// Uncached prompt tokens of requests without a first token.
    pub prefill_tokens: u64,
    /// Tokens being decoded: prompt and output of requests past their first token.
    pub decode_tokens: u64,
}

/// The ledger. One writer; reads are array look-ups.
#[derive(Debug, Default)]
pub struct InFlight {}

impl InFlight {
    /// What `endpoint` has outstanding; nothing for another incarnation than the row's.
    #[must_use]
    pub fn load(&self, endpoint: EndpointRef) -> Load {
        let _ = endpoint;
        Load::default()
    }
}
