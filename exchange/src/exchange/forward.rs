//! What a routed request carries to the proxy's router.

use crate::headers;
use crate::pool::Picked;
use crate::rewrite::Splice;
use crate::settings::{DestinationFormat, Settings};

/// Failures worth another endpoint: connections refused, resets before the response, and 503. (`reset` also covers a per-try time-out;
/// 5xx in general may have had effects.)
const RETRY_ON: &str = "connect-failure,reset,retriable-status-codes";

/// What to change in the request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forward {
    /// Headers to set, replacing any there are: name and value of each.
    pub set: Vec<(String, String)>,
    /// The change to its body, if there is one.
    pub body: Option<Splice>,
}

// === impl Forward ===

impl Forward {
    pub(super) fn to(settings: &Settings, picked: &Picked, inference: bool, streamed: bool) -> Self {
        let mut addresses = picked.ranked.iter().map(|(_, address)| &**address);
        let mut forward = Self::default();
        let retries = match settings.destination_format {
            DestinationFormat::List => {
                forward.set(&settings.destination_header, addresses.collect::<Vec<_>>().join(","));
                picked.ranked.len().saturating_sub(1)
            }
            DestinationFormat::Single => {
                forward.set(&settings.destination_header, addresses.next().unwrap_or_default());
                if let Some(second) = addresses.next() {
                    forward.set(&settings.fallback_header, second);
                }
                0
            }
        };
        for (name, addresses) in [
            (headers::PREFILLER, picked.prefill.as_slice()),
            (headers::ENCODERS, picked.encode.as_slice()),
            (headers::DATA_PARALLEL, picked.data_parallel.as_slice()),
        ] {
            if !addresses.is_empty() {
                forward.set(name, addresses.join(","));
            }
        }
        forward.retries(settings, if settings.retry { retries } else { 0 }, streamed);
        if inference {
            forward.set(headers::LOAD_FORMAT, "TEXT");
        }
        forward
    }

    /// The model goes by another name. `length` is that of the body before, where the client declared it.
    pub(super) fn rewrite(&mut self, splice: Splice, length: Option<usize>) {
        if let Some(length) = length {
            self.set(headers::CONTENT_LENGTH, splice.length(length).to_string());
        }
        // In an encoded reply nobody could put the client's name back.
        self.set(headers::ACCEPT_ENCODING, "identity");
        self.body = Some(splice);
    }

    /// Any host will do: the proxy has no state and may fail open.
    pub(super) fn open() -> Self {
        let mut forward = Self::default();
        forward.set(headers::OPEN, "1");
        forward
    }

    /// More attempts than list entries would end at the fallback balancer and hide the engine's own 503 behind the proxy's.
    fn retries(&mut self, settings: &Settings, retries: usize, streamed: bool) {
        self.set(headers::MAX_RETRIES, retries.to_string());
        if retries > 0 {
            self.set(headers::RETRY_ON, RETRY_ON);
            self.set(headers::RETRIABLE_STATUS_CODES, "503");
        }
        if streamed && settings.per_try_timeout_ms > 0 {
            self.set(headers::PER_TRY_TIMEOUT_MS, settings.per_try_timeout_ms.to_string());
        }
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.set.push((name.to_owned(), value.into()));
    }
}
