//! The client of a request.

use super::request_head::RequestHead;
use crate::settings::ExchangeSettings;

/// The facts about the client of a request.
#[derive(Debug, Default)]
pub(super) struct ClientFacts {
    /// The client's credentials, as a hash.
    pub(super) credentials: u64,
    /// The authenticated client, or its address, as a hash.
    pub(super) hash: u64,
    /// The authenticated client, where caches are separated by it.
    pub(super) tenant: Box<str>,
}

fn text(value: Option<&[u8]>) -> Option<&str> {
    value.and_then(|value| std::str::from_utf8(value).ok())
}

// === impl ClientFacts ===

impl ClientFacts {
    pub(super) fn from_headers(head: &RequestHead<'_>, settings: &ExchangeSettings) -> Self {
        let tenant = head.client.filter(|_| settings.separates_caches());
        Self {
            credentials: text(head.credentials).map_or(0, scheduler::name_hash),
            hash: head.client(),
            tenant: text(tenant).unwrap_or_default().into(),
        }
    }

    /// Sets the fairness id, which the proxy has checked. Unless a header names the client, it is
    /// the client.
    pub(super) fn set_flow(&mut self, id: &str) {
        self.hash = scheduler::name_hash(id);
        if self.tenant.is_empty() {
            self.tenant = id.into();
        }
    }
}
