//! The failures of one endpoint since its last success. A success may come late: an endpoint that
//! serves long streams has answered others long before.

use scheduler::Timestamp;

use super::answer_window::WINDOW_MS;
use super::health::STREAK;
use super::witnesses::{LastWitnesses, SeenClients, WitnessMark};

/// A good answer to a client is recorded again after this time, in ms. So while good answers come,
/// the last recorded one is never older than [`WINDOW_MS`], in any worker.
const ANSWERED_AGAIN_MS: u64 = WINDOW_MS / 2;

/// The counted failures of one endpoint, seen by any worker of the process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FailureStreak {
    /// Failures of different witnesses since the last success.
    length: f32,
    began: Timestamp,
    /// The time of the last failure.
    failed_at: Timestamp,
    /// The client of all failures. The default if there are several clients, or if a failure is not
    /// the fault of a request.
    only_client: WitnessMark,
    witnesses: LastWitnesses,
    /// The clients that the endpoint answered last, with the first byte of a good reply.
    answered: SeenClients,
}

// === impl FailureStreak ===

impl FailureStreak {
    pub(super) fn length(&self) -> f32 {
        self.length
    }

    /// The failures, unless the last one is long ago.
    pub(super) fn recent(&self, now: Timestamp) -> f32 {
        if now.ms_since(self.failed_at) < WINDOW_MS {
            self.length
        } else {
            0.0
        }
    }

    /// Whether one client cannot have caused the streak.
    pub(super) fn is_of_several(&self) -> bool {
        self.length > 0.0 && self.only_client == WitnessMark::default()
    }

    /// The last failure that counted, and its time.
    pub(super) fn last_witness(&self) -> (WitnessMark, Timestamp) {
        self.witnesses.newest()
    }

    /// The share of the last failures that this client's requests are.
    pub(super) fn share(&self, client: WitnessMark, now: Timestamp) -> f32 {
        self.witnesses.share(client, now)
    }

    /// Records that a good reply to this client began. Returns whether the other workers must know
    /// this, because there is a streak and they have not heard it lately.
    pub(super) fn note_answer(&mut self, client: WitnessMark, now: Timestamp) -> bool {
        let is_known = self
            .answered
            .since(self.began, ANSWERED_AGAIN_MS, now)
            .any(|known| known == client);
        if is_known {
            return false;
        }
        self.answered.note(client, now);
        self.length > 0.0
    }

    /// Records the failure of a witness. Returns whether it counts. If the endpoint lately answered
    /// a client without a failure in this streak, few failures of one client count in the whole
    /// streak. Otherwise this client may be the only one that uses a broken endpoint, so as few
    /// count in [`WINDOW_MS`], and all once there are enough to eject: then they are failed probes,
    /// which keep the endpoint ejected.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn counts(
        &mut self,
        mark: WitnessMark,
        is_paired: bool,
        of_one_client_max: usize,
        now: Timestamp,
    ) -> bool {
        let began = self.began;
        let fails = |client| self.witnesses.has_client(client, began);
        let answers_others =
            self.length > 0.0 && !self.answered.since(began, WINDOW_MS, now).all(fails);
        let (since, max) = if answers_others {
            (began, of_one_client_max)
        } else if self.length >= STREAK {
            (now, usize::MAX)
        } else {
            (now, of_one_client_max)
        };
        self.witnesses.record(mark, is_paired, max, since, now)
    }

    /// Records a failure that counts. `client` is the default if the request is not the reason.
    pub(super) fn lengthen(&mut self, client: WitnessMark, now: Timestamp) {
        if self.length <= 0.0 {
            self.began = now;
            self.only_client = client;
        } else if self.only_client != client {
            self.only_client = WitnessMark::default();
        }
        self.length += 1.0;
        self.failed_at = now;
    }

    /// Ends the streak. Returns whether there was one.
    pub(super) fn end(&mut self) -> bool {
        std::mem::take(&mut self.length) > 0.0
    }
}
