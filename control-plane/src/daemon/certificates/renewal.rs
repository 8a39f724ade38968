//! Makes the next certificate when the present one is due, from its arguments and a random key.

use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, KeyUsagePurpose,
    PKCS_RSA_SHA256, PublicKeyData, SignatureAlgorithm, SigningKey, date_time_ymd,
};
use ring::rand::SystemRandom;
use ring::signature::{KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_parser::extensions::GeneralName;

/// How long a CA is in force before it signs: until then a pod may not trust it yet. A kubelet
/// writes a changed Secret into its pods within two minutes.
const CA_AGE_MIN: u64 = 3_600;

/// How long before now a new certificate begins, in seconds: clocks of other machines may be slow.
const SKEW: u64 = 300;

/// A certificate and its key, PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPair {
    /// The certificate.
    pub cert: String,
    /// The private key.
    pub key: String,
}

/// What is read of a certificate.
#[derive(Debug)]
struct CertificateFacts {
    /// The validity, in seconds since 1970.
    from: u64,
    until: u64,
    /// The DNS names, and what it is for.
    names: Vec<String>,
    uses: Vec<ExtendedKeyUsagePurpose>,
}

/// An RSA key, as Helm makes them for a CA.
struct AuthorityKey(RsaKeyPair);

/// The certificate that replaces `present`, once two thirds of its time are over: with its names,
/// its uses and its validity, a new key, and signed by `ca`. `trusted` is what the pods trust that
/// have `present`.
///
/// # Errors
/// Says why there can be no new certificate.
pub fn renew(
    present: &str,
    trusted: &str,
    ca: &TlsPair,
    now: u64,
) -> Result<Option<TlsPair>, String> {
    let old = CertificateFacts::read(&first(present)?)?;
    let authority = first(&ca.cert)?;
    let signer = AuthorityKey::read(&ca.key)?;
    let issuer = Issuer::from_ca_cert_der(&authority, signer).map_err(|e| e.to_string())?;
    let facts = CertificateFacts::read(&authority)?;
    if facts.until <= now {
        return Err("the CA has expired: raise tls.caGeneration".to_owned());
    }
    if !certificates(trusted)?.contains(&authority) {
        return Err(
            "its ca.crt does not have the CA, so pods would not trust each other".to_owned(),
        );
    }
    let lifetime = old.until.saturating_sub(old.from);
    let is_due = now >= old.from + lifetime / 3 * 2;
    if !is_due || now < facts.from + CA_AGE_MIN {
        return Ok(None);
    }
    let from = now - SKEW;
    let mut params = CertificateParams::new(old.names.clone()).map_err(|e| e.to_string())?;
    params.distinguished_name.push(
        DnType::CommonName,
        old.names.first().ok_or("no DNS name")?.clone(),
    );
    params.not_before = date_time_ymd(1970, 1, 1) + std::time::Duration::from_secs(from);
    params.not_after = params.not_before
        + std::time::Duration::from_secs(lifetime.min(facts.until.saturating_sub(from)));
    params.key_usages = vec![
        KeyUsagePurpose::DigitalSignature,
        KeyUsagePurpose::KeyEncipherment,
    ];
    params.extended_key_usages = old.uses;
    let key = KeyPair::generate().map_err(|e| e.to_string())?;
    let made = params.signed_by(&key, &issuer).map_err(|e| e.to_string())?;
    Ok(Some(TlsPair {
        cert: made.pem(),
        key: key.serialize_pem(),
    }))
}

fn certificates(pem: &str) -> Result<Vec<CertificateDer<'static>>, String> {
    CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|e| e.to_string())
}

fn first(pem: &str) -> Result<CertificateDer<'static>, String> {
    certificates(pem)?
        .into_iter()
        .next()
        .ok_or_else(|| "no certificate in it".to_owned())
}

// === impl CertificateFacts ===

impl CertificateFacts {
    fn read(der: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, read) = x509_parser::parse_x509_certificate(der).map_err(|e| e.to_string())?;
        let seconds = |at: x509_parser::time::ASN1Time| {
            u64::try_from(at.timestamp()).map_err(|_| "it is from before 1970".to_owned())
        };
        let names = read.subject_alternative_name().map_err(|e| e.to_string())?;
        let names = names.map(|found| found.value.general_names.as_slice());
        let dns = names.unwrap_or_default().iter().map(|name| match name {
            GeneralName::DNSName(name) => Ok((*name).to_owned()),
            other => Err(format!("{other} is no DNS name")),
        });
        let uses = read.extended_key_usage().map_err(|e| e.to_string())?;
        let client = uses.as_ref().is_some_and(|uses| uses.value.client_auth);
        let server = uses.as_ref().is_some_and(|uses| uses.value.server_auth);
        Ok(Self {
            from: seconds(read.validity().not_before)?,
            until: seconds(read.validity().not_after)?,
            names: dns.collect::<Result<_, _>>()?,
            uses: [
                server.then_some(ExtendedKeyUsagePurpose::ServerAuth),
                client.then_some(ExtendedKeyUsagePurpose::ClientAuth),
            ]
            .into_iter()
            .flatten()
            .collect(),
        })
    }
}

// === impl AuthorityKey ===

impl AuthorityKey {
    fn read(pem: &str) -> Result<Self, String> {
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|e| e.to_string())?;
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
