//! Makes a new certificate when the current certificate must be renewed. This module uses only its
//! arguments and a random key.

use std::time::Duration;

use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_RSA_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey, date_time_ymd,
};
use ring::rand::SystemRandom;
use ring::signature::{KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::time::ASN1Time;

use crate::error::error_text;

const DAY: u64 = 86_400;

/// The minimum age of a CA before it signs, in seconds. A pod may not trust a younger CA yet,
/// because a kubelet takes up to two minutes to write a changed Secret into its pods.
const CA_AGE_MIN: u64 = 3_600;

/// The time by which the start of a new certificate's validity lies in the past, in seconds. The
/// start lies in the past, because clocks of other machines may be slow.
const SKEW: u64 = 300;

/// A certificate and its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPair {
    pub cert: String,
    pub key: String,
}

/// An RSA key, as Helm makes them for a CA.
struct AuthorityKey(RsaKeyPair);

/// The certificate to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedCertificate<'a> {
    /// The DNS names, at least one. The names come from the configuration and not from the Secret,
    /// because a client that can write the Secret could put another certificate into it.
    pub names: &'a [String],
    /// The validity, in days.
    pub days: u64,
}

/// Makes the certificate that replaces `present`, with a new key and signed by `ca`. Returns `None`
/// while at least a third of the validity is left. `trusted` are the CAs that the pods with
/// `present` trust.
///
/// # Errors
/// Fails if no new certificate can be made.
pub fn renew(
    present: &str,
    trusted: &str,
    wanted: &WantedCertificate<'_>,
    ca: &TlsPair,
    now: u64,
) -> Result<Option<TlsPair>, String> {
    let (_, until) = validity(&first(present)?)?;
    let authority = first(&ca.cert)?;
    let signer = AuthorityKey::read(&ca.key)?;
    let issuer = Issuer::from_ca_cert_der(&authority, signer).map_err(error_text)?;
    let (ca_from, ca_until) = validity(&authority)?;
    if ca_until <= now {
        return Err("the CA has expired: raise tls.caGeneration".to_owned());
    }
    if !certificates(trusted)?.contains(&authority) {
        return Err("its ca.crt lacks the CA, so pods would not trust each other".to_owned());
    }
    let lifetime = wanted.days.saturating_mul(DAY);
    if now + lifetime / 3 < until || now < ca_from + CA_AGE_MIN {
        return Ok(None);
    }
    let from = now - SKEW;
    let until = (from.saturating_add(lifetime)).min(ca_until);
    let key = KeyPair::generate().map_err(error_text)?;
    let params = params(wanted.names, from, until).map_err(error_text)?;
    let made = params.signed_by(&key, &issuer).map_err(error_text)?;
    Ok(Some(TlsPair {
        cert: made.pem(),
        key: key.serialize_pem(),
    }))
}

/// Returns the parameters of a certificate as the chart makes it, for servers and clients.
fn params(names: &[String], from: u64, until: u64) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    if let Some(name) = names.first() {
        let common = DnType::CommonName;
        params.distinguished_name.push(common, name.clone());
    }
    let at = |seconds| date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    params.not_before = at(from);
    params.not_after = at(until);
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    Ok(params)
}

/// Returns the start and the end of a certificate's validity, in seconds since 1970.
fn validity(der: &CertificateDer<'_>) -> Result<(u64, u64), String> {
    let (_, read) = x509_parser::parse_x509_certificate(der).map_err(error_text)?;
    let validity = read.validity();
    let seconds = |at: ASN1Time| {
        u64::try_from(at.timestamp()).map_err(|_| "it is from before 1970".to_owned())
    };
    Ok((seconds(validity.not_before)?, seconds(validity.not_after)?))
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(error_text)
}

fn first(pem: &str) -> Result<CertificateDer<'static>, String> {
    certificates(pem)?
        .into_iter()
        .next()
        .ok_or_else(|| "no certificate in it".to_owned())
}

// === impl AuthorityKey ===

impl AuthorityKey {
    fn read(pem: &str) -> Result<Self, String> {
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(error_text)?;
        let PrivateKeyDer::Pkcs1(key) = key else {
            return Err("the key of the CA is not one that Helm made".to_owned());
        };
        RsaKeyPair::from_der(key.secret_pkcs1_der())
            .map(Self)
            .map_err(|e| format!("the key of the CA: {e}"))
    }
}

impl PublicKeyData for AuthorityKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_RSA_SHA256
    }
}

impl SigningKey for AuthorityKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let mut signature = vec![0; self.0.public().modulus_len()];
        self.0
            .sign(
                &RSA_PKCS1_SHA256,
                &SystemRandom::new(),
                message,
                &mut signature,
            )
            .map_err(|_| rcgen::Error::RingUnspecified)?;
        Ok(signature)
    }
}

#[cfg(test)]
mod tests;
