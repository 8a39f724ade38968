use std::time::Duration;

use rcgen::{BasicConstraints, IsCa};
use rustls::RootCertStore;
use rustls::pki_types::{ServerName, UnixTime};

use super::*;

const DAY: u64 = 86_400;
/// Some day in 2026.
const MADE: u64 = 20_500 * DAY;
const NAMES: [&str; 2] = ["daemon.sp.svc.cluster.local", "daemon.sp.svc"];

/// As Helm makes them: RSA.
const CA_KEY: &str = include_str!("../test_ca.key");

fn at(seconds: u64) -> CertificateParams {
    let mut params = CertificateParams::new(NAMES.map(str::to_owned)).unwrap();
    params.not_before = date_time_ymd(1970, 1, 1) + Duration::from_secs(seconds);
    params.not_after = params.not_before + Duration::from_secs(90 * DAY);
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    params
}

/// A CA that begins at that time and ends after that time.
fn ca(from: u64, lifetime: u64) -> TlsPair {
    let mut params = at(from);
    params.subject_alt_names.clear();
    params.extended_key_usages.clear();
    params.not_after = params.not_before + Duration::from_secs(lifetime);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
        .distinguished_name
        .push(DnType::CommonName, "switchpoint sp/sp 1");
    let cert = params.self_signed(&AuthorityKey::read(CA_KEY).unwrap());
    TlsPair {
        cert: cert.unwrap().pem(),
        key: CA_KEY.to_owned(),
    }
}

/// A certificate of [`MADE`], valid for 90 days.
fn present(ca: &TlsPair) -> String {
    let issuer = AuthorityKey::read(&ca.key).unwrap();
    let issuer = Issuer::from_ca_cert_der(&first(&ca.cert).unwrap(), issuer).unwrap();
    let key = KeyPair::generate().unwrap();
    at(MADE).signed_by(&key, &issuer).unwrap().pem()
}

/// Whether a client that trusts `ca` accepts the certificate for `name` at that time.
fn trusts(ca: &str, pair: &TlsPair, name: &str, now: u64) -> bool {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut roots = RootCertStore::empty();
    roots.add(first(ca).unwrap()).unwrap();
    let verifier = rustls::client::WebPkiServerVerifier::builder(roots.into())
        .build()
        .unwrap();
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let now = UnixTime::since_unix_epoch(Duration::from_secs(now));
    rustls::client::danger::ServerCertVerifier::verify_server_cert(
        &*verifier,
        &first(&pair.cert).unwrap(),
        &[],
        &name,
        &[],
        now,
    )
    .is_ok()
}

#[test]
fn a_certificate_is_renewed_when_two_thirds_of_its_time_are_over() {
    let ca = ca(MADE - DAY, 3_650 * DAY);
    let present = present(&ca);
    let renewed = |day| renew(&present, &ca.cert, &ca, MADE + day * DAY).unwrap();
    assert_eq!(renewed(0), None);
    assert_eq!(renewed(59), None);
    assert!(renewed(60).is_some());
    assert!(renewed(200).is_some(), "also when it has expired");
}

#[test]
fn the_new_one_has_the_names_the_uses_and_the_validity_of_the_old_one_and_a_new_key() {
    let ca = ca(MADE - DAY, 3_650 * DAY);
    let now = MADE + 61 * DAY;
    let made = renew(&present(&ca), &ca.cert, &ca, now).unwrap().unwrap();
    let facts = CertificateFacts::read(&first(&made.cert).unwrap()).unwrap();
    assert_eq!(facts.names, NAMES);
    assert_eq!(
        (facts.from, facts.until),
        (now - SKEW, now - SKEW + 90 * DAY)
    );
    assert_eq!(facts.uses, at(0).extended_key_usages);
    assert!(NAMES.iter().all(|name| trusts(&ca.cert, &made, name, now)));
    assert!(!trusts(&ca.cert, &made, "other.sp.svc", now));
    assert!(!trusts(&ca.cert, &made, NAMES[0], now + 90 * DAY));
    let key = PrivateKeyDer::from_pem_slice(made.key.as_bytes()).unwrap();
    let chain = vec![first(&made.cert).unwrap()];
    rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("the key is that of the certificate");
    let again = renew(&made.cert, &ca.cert, &ca, now + 61 * DAY).unwrap();
    assert_ne!(again.unwrap().key, made.key);
}

#[test]
fn a_ca_signs_nothing_that_pods_may_not_trust_yet_or_that_outlives_it() {
    let old = ca(MADE - DAY, 3_650 * DAY);
    let now = MADE + 70 * DAY;
    let young = ca(now - CA_AGE_MIN + 1, 3_650 * DAY);
    let present = present(&old);
    let both = format!("{}{}", young.cert, old.cert);
    assert_eq!(renew(&present, &both, &young, now), Ok(None));
    assert!(renew(&present, &both, &young, now + 1).unwrap().is_some());
    let untrusted = renew(&present, &old.cert, &young, now + 1);
    assert!(untrusted.unwrap_err().contains("ca.crt"));

    let short = ca(MADE - DAY, 80 * DAY);
    let made = renew(&present, &short.cert, &short, now).unwrap().unwrap();
    let facts = CertificateFacts::read(&first(&made.cert).unwrap()).unwrap();
    assert_eq!(facts.until, MADE + 79 * DAY);
    let over = renew(&present, &short.cert, &short, MADE + 79 * DAY);
    assert!(over.unwrap_err().contains("expired"));
}

#[test]
fn what_is_no_certificate_or_no_key_is_refused_with_a_reason() {
    let good = ca(MADE - DAY, 3_650 * DAY);
    let present = present(&good);
    let no_key = TlsPair {
        key: KeyPair::generate().unwrap().serialize_pem(),
        ..good.clone()
    };
    for (present, ca) in [("", &good), ("junk", &good), (present.as_str(), &no_key)] {
        assert!(renew(present, &good.cert, ca, MADE).is_err());
    }
}
