//! The connections to one endpoint that were lost lately.

use scheduler::Timestamp;

use super::witnesses::WitnessMark;

/// This many lost connections in a row eject an endpoint that answered a moment ago. A single one
/// may be caused by its request.
const LOST_STREAK: u32 = 2;

/// How long requests of one client avoid an endpoint that lost its connection, in ms: as long as
/// the longest ejection. So if only this client uses a broken endpoint, it loses few requests.
const AVOIDED_MS: u64 = 5_000;

/// Connections to one endpoint that were lost since its last answer of any kind.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectionLosses {
    /// How many were lost, each with a different prompt.
    count: u32,
    prompt: u64,
    /// The client of the last one, if its request may be the reason, and the time. Both stay after
    /// an answer.
    client: WitnessMark,
    at: Timestamp,
}

// === impl ConnectionLosses ===

impl ConnectionLosses {
    /// Records a lost connection. `client` is the client whose request may be the reason, or `None`
    /// if only the endpoint may be. Returns whether to eject the endpoint: enough connections were
    /// lost in a row, and not all by this client. One is enough unless the endpoint `is_alive`.
    pub(super) fn record(
        &mut self,
        prompt: u64,
        client: Option<u64>,
        is_alive: bool,
        now: Timestamp,
    ) -> bool {
        let mark = client.map_or(WitnessMark::default(), WitnessMark::of_client);
        let is_by_one = client.is_some() && (self.count == 0 || self.client == mark);
        self.count += u32::from(self.count == 0 || prompt == 0 || self.prompt != prompt);
        self.prompt = prompt;
        self.client = mark;
        self.at = now;
        !is_by_one && self.count >= if is_alive { LOST_STREAK } else { 1 }
    }

    /// Records that the endpoint answered.
    pub(super) fn end(&mut self) {
        self.count = 0;
    }

    /// Whether requests of this client avoid the endpoint.
    pub(super) fn is_avoided_by(&self, client: WitnessMark, now: Timestamp) -> bool {
        self.client == client && now.ms_since(self.at) < AVOIDED_MS
    }
}
