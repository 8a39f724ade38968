//! The client of a request. Only this module decides who the client is.
//!
//! The configured header names the client. Without this header, the fairness id in the proxy's
//! metadata names the client. Without both, the client is the downstream address: the last entry of
//! `x-forwarded-for`, which the proxy appends. All requests without any of the three count as
//! requests from one client.

use std::net::Ipv6Addr;

use super::request_head::RequestHead;
use crate::settings::ExchangeSettings;

/// The facts about the client of a request.
#[derive(Debug, Default)]
pub(super) struct ClientFacts {
    /// The client's credentials, as a hash.
    pub(super) credentials: u64,
    /// The client, as a hash; 0 if it is unknown.
    pub(super) hash: u64,
    /// The name of the client, if the settings separate caches by client. Empty without a name.
    pub(super) tenant: Box<str>,
    /// Whether a header or the proxy's metadata names the client.
    is_named: bool,
    separates_caches: bool,
}

fn text(value: Option<&[u8]>) -> Option<&str> {
    value.and_then(|value| std::str::from_utf8(value).ok())
}

/// A hash of the address. A whole IPv6 network (/64) is one client, because a client usually gets a
/// whole network.
fn address_hash(address: &str) -> u64 {
    let network = address
        .parse::<Ipv6Addr>()
        .map_or(0, |address| u128::from(address) >> 64);
    match u64::try_from(network) {
        Ok(network) if network > 0 => network,
        _ if address.is_empty() => 0,
        _ => scheduler::name_hash(address),
    }
}

// === impl ClientFacts ===

impl ClientFacts {
    pub(super) fn from_headers(head: &RequestHead<'_>, settings: &ExchangeSettings) -> Self {
        let address = head.forwarded_for.rsplit(|&byte| byte == b',').next();
        let mut client = Self {
            credentials: text(head.credentials).map_or(0, scheduler::name_hash),
            hash: address_hash(text(address).unwrap_or_default().trim_ascii()),
            separates_caches: settings.separates_caches(),
            ..Self::default()
        };
        client.set_name(text(head.client));
        client
    }

    /// Sets the name of the client, unless it is known.
    pub(super) fn set_name(&mut self, name: Option<&str>) {
        let Some(name) = name.filter(|_| !self.is_named) else {
            return;
        };
        self.is_named = true;
        self.hash = scheduler::name_hash(name);
        if self.separates_caches {
            self.tenant = name.into();
        }
    }

    /// Whether a header or the proxy's metadata names the client.
    pub(super) fn is_named(&self) -> bool {
        self.is_named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(
        settings: &ExchangeSettings,
        headers: &[(&'static str, &'static str)],
        fairness_id: Option<&str>,
    ) -> u64 {
        let pairs = headers
            .iter()
            .map(|(name, value)| (name.as_bytes(), value.as_bytes()));
        let mut client = ClientFacts::from_headers(&RequestHead::read(pairs, settings), settings);
        client.set_name(fairness_id);
        client.hash
    }

    #[test]
    fn a_client_is_who_the_proxy_says_and_else_the_address_that_it_saw() {
        let by_address = ExchangeSettings::default();
        let by_header = ExchangeSettings {
            client_header: "x-user".to_owned(),
            ..ExchangeSettings::default()
        };
        let ann = [("x-forwarded-for", "1.1.1.1, 10.0.0.7"), ("x-user", "ann")];
        let bob = [("x-forwarded-for", "2.2.2.2,10.0.0.7"), ("x-user", "bob")];
        let nobody = [("x-forwarded-for", "10.0.0.8"), ("x-user", "")];
        let name = scheduler::name_hash;
        for (settings, headers, fairness_id, expected) in [
            (&by_address, &ann[..], None, name("10.0.0.7")),
            (&by_address, &bob, None, name("10.0.0.7")),
            (&by_address, &nobody, None, name("10.0.0.8")),
            (&by_address, &[], None, 0),
            (&by_address, &[("x-forwarded-for", "")], None, 0),
            (&by_address, &ann, Some("red"), name("red")),
            (&by_header, &ann, None, name("ann")),
            (&by_header, &bob, Some("red"), name("bob")),
            (&by_header, &nobody, Some("red"), name("red")),
            (&by_header, &nobody, None, name("10.0.0.8")),
        ] {
            assert_eq!(
                client(settings, headers, fairness_id),
                expected,
                "{headers:?} {fairness_id:?}"
            );
        }
    }

    #[test]
    fn a_network_of_ipv6_addresses_is_one_client() {
        let at = |address| {
            let headers = [("x-forwarded-for", address)];
            client(&ExchangeSettings::default(), &headers, None)
        };
        assert_eq!(at("2001:db8:1:2::1"), at("2001:db8:1:2:ffff::7"));
        let others = [
            "2001:db8:1:3::1",
            "::1",
            "::2",
            "::ffff:10.0.0.7",
            "10.0.0.7",
        ];
        for (index, one) in others.iter().enumerate() {
            for another in others.iter().skip(index + 1) {
                assert_ne!(at(one), at(another), "{one} {another}");
            }
        }
    }

    #[test]
    fn a_client_certificate_names_a_client_by_the_header_that_forwards_it() {
        let settings = ExchangeSettings {
            client_header: "x-forwarded-client-cert".to_owned(),
            ..ExchangeSettings::default()
        };
        let certificate = |value| client(&settings, &[("x-forwarded-client-cert", value)], None);
        let ann = r#"Hash=ab;Subject="CN=ann,O=red";URI=spiffe://red/ann"#;
        assert_eq!(certificate(ann), certificate(ann));
        assert_ne!(certificate(ann), certificate("URI=spiffe://red/bob"));
    }
}
