//! The prompts and clients whose requests an endpoint failed last. While there are several clients,
//! only a few failures of one client count.

use scheduler::Timestamp;

use super::answer_window::WINDOW_MS;

/// The last witnesses remembered for each endpoint: more than make a streak.
const WITNESSES_MAX: usize = 8;

/// How many failures of one client count against an endpoint in [`WINDOW_MS`], by the number of
/// clients seen lately. If there is one client, all count; otherwise fewer than make a streak.
const OF_ONE_CLIENT_MAX: [usize; 4] = [usize::MAX, usize::MAX, 3, 2];

/// How long a client counts as seen, in ms.
const SEEN_MS: u64 = 60_000;

/// The number of bits of the client in a [`WitnessMark`]. The other bits belong to the hash of the
/// prompt or client that failed. Two clients have the same bits one time in 1,023; then they count
/// as one.
const CLIENT_BITS: u32 = 10;
const CLIENT_MASK: u32 = (1 << CLIENT_BITS) - 1;

/// A prompt or client that failed at an endpoint, as a hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// This prompt; its client succeeds with others. 0 means an unknown prompt, which differs from
    /// all others.
    Prompt(u64),
    /// Any prompt of this client, which had no success lately.
    Client(u64),
}

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFailure {
    /// The connection failed, or no answer came in time.
    Refused,
    /// The connection was lost, or the proxy tried the next endpoint for an unknown reason. The
    /// values are the hashes of the prompt and of the client. The client is `None` if another
    /// endpoint then served the same request, which shows that the request is not the reason.
    Lost(u64, Option<u64>),
    /// The answer may count against the endpoint. The number is the hash of the client.
    Answer(Witness, u64),
}

/// A witness and its client, as the workers of a process exchange them: bits of two hashes. The
/// bits of a client are never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WitnessMark(pub(super) u32);

/// The last witnesses against an endpoint, and where the next is written.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastWitnesses {
    last: [(WitnessMark, Timestamp); WITNESSES_MAX],
    next: usize,
}

/// The clients seen last, the newest first, at most as many as [`OF_ONE_CLIENT_MAX`] distinguishes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SeenClients([(WitnessMark, Timestamp); OF_ONE_CLIENT_MAX.len() - 1]);

// === impl RequestFailure ===

impl RequestFailure {
    /// The prompt and the client of the failure, if the request may be the reason.
    pub(super) fn mark(self) -> Option<WitnessMark> {
        match self {
            Self::Answer(witness, client) => Some(WitnessMark::new(witness, client)),
            Self::Lost(prompt, Some(client)) => {
                Some(WitnessMark::new(Witness::Prompt(prompt), client))
            }
            Self::Refused | Self::Lost(_, None) => None,
        }
    }
}

// === impl WitnessMark ===

impl WitnessMark {
    /// The mark of this client, without a witness.
    #[expect(clippy::cast_possible_truncation, reason = "it is below the mask")]
    pub(super) fn of_client(client: u64) -> Self {
        Self((client % u64::from(CLIENT_MASK)) as u32 + 1)
    }

    #[expect(clippy::cast_possible_truncation, reason = "bits of a hash")]
    pub(super) fn new(witness: Witness, client: u64) -> Self {
        let (Witness::Prompt(hash) | Witness::Client(hash)) = witness;
        Self((hash as u32) << CLIENT_BITS | Self::of_client(client).0)
    }

    pub(super) fn client(self) -> Self {
        Self(self.0 & CLIENT_MASK)
    }

    /// The client, or none if there is only one client, whose failures are all there are.
    pub(super) fn client_of(self, of_one_client_max: usize) -> Self {
        if of_one_client_max < usize::MAX {
            self.client()
        } else {
            Self::default()
        }
    }

    fn what(self) -> u32 {
        self.0 >> CLIENT_BITS
    }
}

// === impl LastWitnesses ===

impl LastWitnesses {
    /// Whether this client failed at this time or later.
    pub(super) fn has_client(&self, client: WitnessMark, since: Timestamp) -> bool {
        let mut last = self.last.iter();
        last.any(|(known, at)| known.client() == client && *at >= since)
    }

    /// The last failure, and its time.
    pub(super) fn newest(&self) -> (WitnessMark, Timestamp) {
        let at = (self.next + WITNESSES_MAX - 1) % WITNESSES_MAX;
        self.last.get(at).copied().unwrap_or_default()
    }

    /// The share of this client in the last failures of an answer window.
    pub(super) fn share(&self, client: WitnessMark, now: Timestamp) -> f32 {
        if client == WitnessMark::default() {
            return 0.0;
        }
        let mut all = 0.0_f32;
        let mut own = 0.0_f32;
        for (mark, at) in self.last {
            if mark != WitnessMark::default() && now.ms_since(at) < WINDOW_MS {
                all += 1.0;
                own += f32::from(u8::from(mark.client() == client));
            }
        }
        own / all.max(1.0)
    }

    /// Records a failure. Returns whether it counts. Its witness must not be among the last, unless
    /// `is_paired` says that the prompt succeeded elsewhere. Fewer than `of_one_client_max` failures
    /// of its client may count, recent ones and those since `since`.
    pub(super) fn record(
        &mut self,
        mark: WitnessMark,
        is_paired: bool,
        of_one_client_max: usize,
        since: Timestamp,
        now: Timestamp,
    ) -> bool {
        let is_same = |known: &WitnessMark| mark.what() != 0 && known.what() == mark.what();
        let is_known = self.last.iter().any(|(known, _)| is_same(known));
        let of_client = self.last.iter().filter(|(known, at)| {
            known.client() == mark.client() && (*at >= since || now.ms_since(*at) < WINDOW_MS)
        });
        if is_known && !is_paired || of_client.count() >= of_one_client_max {
            return false;
        }
        if let Some(oldest) = self.last.get_mut(self.next) {
            *oldest = (mark, now);
            self.next = (self.next + 1) % WITNESSES_MAX;
        }
        true
    }
}

// === impl SeenClients ===

impl SeenClients {
    /// Moves the client to the front.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn note(&mut self, client: WitnessMark, now: Timestamp) {
        let mut moved = (client, now);
        for seen in &mut self.0 {
            std::mem::swap(seen, &mut moved);
            if moved.0 == client {
                break;
            }
        }
    }

    /// The clients seen at `since` or later, within the last `ms`.
    pub(super) fn since(
        &self,
        since: Timestamp,
        ms: u64,
        now: Timestamp,
    ) -> impl Iterator<Item = WitnessMark> + '_ {
        let is_recent =
            move |(_, at): &&(WitnessMark, Timestamp)| *at >= since && now.ms_since(*at) < ms;
        let seen = self.0.iter().filter(is_recent);
        seen.map(|(client, _)| *client)
    }

    /// How many failures of one client count against an endpoint.
    #[inline(never)] // several callers, and the wasm module should be small
    pub(super) fn of_one_client_max(&self, now: Timestamp) -> usize {
        let is_recent = |(client, at): &&(WitnessMark, Timestamp)| {
            *client != WitnessMark::default() && now.ms_since(*at) < SEEN_MS
        };
        let seen = self.0.iter().filter(is_recent).count();
        OF_ONE_CLIENT_MAX.get(seen).copied().unwrap_or_default()
    }
}
