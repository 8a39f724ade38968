//! The identity of a peer.

use std::sync::{Arc, Weak};

use rustls::pki_types::CertificateDer;
use tonic::service::InterceptorLayer;
use tonic::transport::server::TcpConnectInfo;
use tonic::{Request, Status};
use webpki::EndEntityCert;

use super::ConnectionPermit;

/// The name in the client certificate of a connection: the first URI among its alternative names
/// (such as a SPIFFE id), else the first DNS name, else the subject's common name. The name is
/// `None` without a client certificate, or if the certificate has no name.
///
/// Every request on a listener of the daemon has the name as an extension.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerName(pub Option<Arc<str>>);

/// The identity of the peer from the handshakes of a connection. Each request gets this identity as
/// the extensions [`TcpConnectInfo`] and [`PeerName`].
#[derive(Clone, Debug)]
pub struct PeerInfo {
    pub(super) tcp: TcpConnectInfo,
    pub(super) name: PeerName,
    pub(super) permit: Weak<ConnectionPermit>,
}

/// A layer that adds the peer's identity to the extensions of a request, and records at the
/// listener that the peer made a request.
pub type IdentifyLayer = InterceptorLayer<fn(Request<()>) -> Result<Request<()>, Status>>;

/// Returns the layer that every server on an [`Incoming`](super::Incoming) needs.
#[must_use]
pub fn identify() -> IdentifyLayer {
    InterceptorLayer::new(split)
}

#[allow(clippy::unnecessary_wraps, reason = "the signature of an interceptor")]
fn split(mut request: Request<()>) -> Result<Request<()>, Status> {
    if let Some(PeerInfo { tcp, name, permit }) = request.extensions_mut().remove::<PeerInfo>() {
        if let Some(permit) = permit.upgrade() {
            permit.mark_requested();
        }
        request.extensions_mut().insert(tcp);
        request.extensions_mut().insert(name);
    }
    Ok(request)
}

// === impl PeerName ===

impl PeerName {
    /// Returns the name in a certificate that was verified.
    pub(super) fn from_certificate(certificate: &CertificateDer<'_>) -> Self {
        let Ok(certificate) = EndEntityCert::try_from(certificate) else {
            return Self(None);
        };
        let uri = certificate.valid_uri_names().next();
        let name = uri
            .or_else(|| certificate.valid_dns_names().next())
            .or_else(|| common_name(certificate.subject()));
        Self(name.map(Arc::from))
    }
}

/// Returns the first common name in a subject (RFC 5280: a sequence of sets of pairs of type and
/// value).
fn common_name(mut subject: &[u8]) -> Option<&str> {
    const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
    while let Some((mut set, rest)) = element(subject) {
        subject = rest;
        while let Some((pair, rest)) = element(set) {
            set = rest;
            let (kind, value) = element(pair)?;
            if kind == COMMON_NAME {
                return element(value)
                    .and_then(|(text, _)| std::str::from_utf8(text).ok())
                    .filter(|text| !text.is_empty());
            }
        }
    }
    None
}

/// Returns the content of the first DER element, and the bytes after it. Names are short, so
/// lengths of more than two bytes are not supported.
fn element(der: &[u8]) -> Option<(&[u8], &[u8])> {
    let (_tag, rest) = der.split_first()?;
    let (length, rest) = match rest {
        [short, rest @ ..] if *short < 0x80 => (usize::from(*short), rest),
        [0x81, length, rest @ ..] => (usize::from(*length), rest),
        [0x82, high, low, rest @ ..] => (usize::from(u16::from_be_bytes([*high, *low])), rest),
        _ => return None,
    };
    rest.split_at_checked(length)
}

#[cfg(test)]
mod tests {
    use rcgen::{
        CertificateParams, DistinguishedName, DnType, KeyPair, SanType, string::Ia5String,
    };

    use super::*;

    fn name(common: Option<&str>, dns: &[&str], uri: &[&str]) -> Option<String> {
        let mut params =
            CertificateParams::new(dns.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
                .unwrap();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            // This name needs a length of more than one byte.
            .push(DnType::OrganizationName, "o".repeat(200));
        if let Some(common) = common {
            params.distinguished_name.push(DnType::CommonName, common);
        }
        params.subject_alt_names.extend(
            uri.iter()
                .map(|&uri| SanType::URI(Ia5String::try_from(uri).unwrap())),
        );
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        PeerName::from_certificate(certificate.der())
            .0
            .map(|name| name.to_string())
    }

    #[test]
    fn a_uri_comes_before_a_dns_name_before_a_common_name() {
        let spiffe = "spiffe://cluster.local/ns/gateway/sa/envoy";
        assert_eq!(
            name(Some("c"), &["a.example", "b.example"], &[spiffe]).as_deref(),
            Some(spiffe)
        );
        assert_eq!(
            name(Some("c"), &["a.example", "b.example"], &[]).as_deref(),
            Some("a.example")
        );
        assert_eq!(name(Some("proxy 7"), &[], &[]).as_deref(), Some("proxy 7"));
        assert_eq!(name(None, &[], &[]), None);
    }

    #[test]
    fn bytes_that_are_no_name_have_none() {
        for bytes in [
            &[][..],
            &[0x31],
            &[0x31, 0x80],
            &[0x31, 0x84, 1, 1, 1, 1],
            &[0x31, 9, 0x30, 7, 6, 3, 0x55, 4, 3],
        ] {
            assert_eq!(common_name(bytes), None, "{bytes:?}");
        }
    }
}
