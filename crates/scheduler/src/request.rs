//! A request in the form that the scheduler uses.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use crate::prefix::blocks_of;
use crate::slo::Slo;
use crate::sort::sort_by;

/// One inference request. Its fields are the facts that picking needs.
#[derive(Clone, Debug, Default)]
pub struct Request<'a> {
    /// The model that the engine gets (after a possible rewrite); empty if the body is opaque.
    pub model: &'a str,
    /// The endpoints that the proxy allows. `None` allows the whole pool.
    pub subset: Option<&'a SubsetHint>,
    /// The priority of the request. A request with a priority below 0 may be shed.
    pub priority: i32,
    /// The estimated number of prompt tokens (bytes / bytes per token).
    pub prompt_tokens: u32,
    /// The hashes of the prompt's blocks, first block first. Each hash also depends on all blocks
    /// before its block, and later hashes represent several blocks ([`crate::prefix`]).
    pub prefix_blocks: &'a [u64],
    /// The number of tokens in one block of the prompt.
    pub prefix_block_tokens: u32,
    /// The maximum number of output tokens that the client allows, if it sets a limit.
    pub max_tokens: Option<u32>,
    /// The number of images, videos and audio clips in the prompt.
    pub media_items: u32,
    /// The names and values of the request headers that [`crate::Pipeline::headers`] names.
    pub headers: &'a [(&'a str, &'a str)],
    pub slo: Slo,
    /// Whether the client wants the request to be scheduled by predicted latency.
    pub prediction_based: bool,
    /// The hash of the id of the stored answer that the request continues. The hash is 0 if the
    /// request continues no answer. The scheduler does not use this hash, because the pool has
    /// narrowed [`Self::subset`] to the endpoint that has the answer.
    pub stored_id: u64,
    /// The client, as a hash. The scheduler does not use it, because the pool has marked the
    /// endpoints that requests of the client avoid.
    pub client: u64,
}

impl<'a> Request<'a> {
    /// Returns the number of blocks that the request's hashes represent.
    pub fn blocks(&self) -> u32 {
        blocks_of(self.prefix_blocks, self.prefix_blocks.len())
    }

    /// Returns the value of a header, whatever the case of its name. If the header occurs several
    /// times, returns the first value.
    pub fn header(&self, name: &str) -> Option<&'a str> {
        self.headers
            .iter()
            .find(|(header, _)| header.eq_ignore_ascii_case(name))
            .map(|(_, value)| *value)
    }
}

/// The endpoints that a proxy allows for one request (`x-gateway-destination-endpoint-subset`). An
/// absent hint allows all endpoints, while an empty hint allows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SubsetHint {
    entries: Vec<SubsetEntry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SubsetEntry {
    Socket(SocketAddr),
    Ip(IpAddr),
}

/// The maximum number of entries of a subset hint that are read: as many as a pool can have
/// endpoints.
const SUBSET_ENTRIES_MAX: usize = crate::endpoint::ENDPOINTS_MAX;

impl SubsetHint {
    /// Parses entries: `ip:port`, `[ipv6]:port`, or an address alone, which allows all ports of the
    /// address. Every other entry allows nothing, so a hint with only such entries is empty, not
    /// absent.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Self {
        let mut entries: Vec<SubsetEntry> = entries
            .into_iter()
            .take(SUBSET_ENTRIES_MAX)
            .filter_map(SubsetEntry::parse)
            .collect();
        sort_by(&mut entries, |a, b| a < b);
        entries.dedup();
        Self { entries }
    }

    /// Returns a hint that allows only this address.
    #[must_use]
    pub fn only(socket: SocketAddr) -> Self {
        Self {
            entries: vec![SubsetEntry::Socket(socket)],
        }
    }

    /// Whether the hint allows this `ip:port`.
    pub fn allows(&self, address: &str) -> bool {
        address
            .parse()
            .is_ok_and(|socket| self.allows_socket(socket))
    }

    pub fn allows_socket(&self, socket: SocketAddr) -> bool {
        self.entries
            .binary_search(&SubsetEntry::Socket(socket))
            .is_ok()
            || self
                .entries
                .binary_search(&SubsetEntry::Ip(socket.ip()))
                .is_ok()
    }

    /// Whether the hint allows no endpoint.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Formats the hint as a comma-separated list of its entries, which can be parsed again.
impl fmt::Display for SubsetHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries.iter().enumerate().try_for_each(|(at, entry)| {
            let comma = if at == 0 { "" } else { "," };
            match entry {
                SubsetEntry::Socket(socket) => write!(f, "{comma}{socket}"),
                SubsetEntry::Ip(ip) => write!(f, "{comma}{ip}"),
            }
        })
    }
}

impl SubsetEntry {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if let Ok(socket) = text.parse() {
            return Some(Self::Socket(socket));
        }
        let bare = text
            .strip_prefix('[')
            .and_then(|t| t.strip_suffix(']'))
            .unwrap_or(text);
        bare.parse().ok().map(Self::Ip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(hint: &[&str], address: &str) -> bool {
        SubsetHint::parse(hint.iter().copied()).allows(address)
    }

    #[test]
    fn port_matters_unless_left_out() {
        assert!(allows(&["10.0.0.1:8000"], "10.0.0.1:8000"));
        assert!(!allows(&["10.0.0.1:8000"], "10.0.0.1:8001"));
        assert!(allows(&["10.0.0.1"], "10.0.0.1:8001"));
        assert!(!allows(&["10.0.0.2"], "10.0.0.1:8001"));
    }

    #[test]
    fn ipv6_with_and_without_brackets() {
        assert!(allows(&["[2001:db8::1]:8000"], "[2001:db8::1]:8000"));
        assert!(allows(&["[2001:db8::1]"], "[2001:db8::1]:8000"));
        assert!(allows(&["2001:db8::1"], "[2001:db8::1]:8000"));
        assert!(
            allows(&["2001:0db8:0::1"], "[2001:db8::1]:8000"),
            "another spelling of the same address"
        );
    }

    #[test]
    fn a_hint_is_printed_as_it_is_parsed() {
        for (hint, printed) in [
            ("", ""),
            ("nonsense", ""),
            (
                "[::1],10.0.0.2,[::1]:8000, 10.0.0.1:80",
                "10.0.0.1:80,[::1]:8000,10.0.0.2,::1",
            ),
        ] {
            let hint = SubsetHint::parse(hint.split(','));
            assert_eq!(hint.to_string(), printed);
            assert_eq!(SubsetHint::parse(printed.split(',')), hint);
        }
    }

    #[test]
    fn duplicates_spaces_and_garbage() {
        assert!(allows(
            &[" 10.0.0.1:8000 ", "10.0.0.1:8000", "nonsense", ""],
            "10.0.0.1:8000"
        ));
        let hint = SubsetHint::parse(["nonsense", "10.0.0.1:99999"]);
        assert!(hint.is_empty());
        assert!(!SubsetHint::parse(["nonsense", "10.0.0.1"]).is_empty());
        assert!(!hint.allows("10.0.0.1:8000"));
    }
}
