use rcgen::{BasicConstraints, IsCa};
use rustls::RootCertStore;
use rustls::pki_types::{ServerName, UnixTime};

use super::*;

/// Some day in 2026.
const MADE: u64 = 20_500 * DAY;

/// An RSA key, as Helm makes it.
const CA_KEY: &str = include_str!("../test_ca.key");

fn names() -> [String; 2] {
    ["daemon.sp.svc.cluster.local", "daemon.sp.svc"].map(str::to_owned)
}

/// Returns a CA that is valid from `from` on, for `lifetime`.
fn ca(from: u64, lifetime: u64) -> TlsPair {
    let mut params = params(&[], from, from + lifetime).unwrap();
    params.extended_key_usages.clear();
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

/// Returns a certificate of [`MADE`], valid for 90 days.
fn present() -> String {
    let key = KeyPair::generate().unwrap();
    let params = params(&["any.name".to_owned()], MADE, MADE + 90 * DAY).unwrap();
    params.self_signed(&key).unwrap().pem()
}

/// Returns the replacement of [`present`], valid for 90 days.
fn renewed(trusted: &str, ca: &TlsPair, now: u64) -> Result<Option<TlsPair>, String> {
    let wanted = WantedCertificate {
        names: &names(),
        days: 90,
    };
    renew(&present(), trusted, &wanted, ca, now)
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
    let on_day = |day| renewed(&ca.cert, &ca, MADE + day * DAY).unwrap();
    assert_eq!(on_day(0), None);
    assert_eq!(on_day(59), None);
    assert!(on_day(60).is_some());
    assert!(on_day(200).is_some(), "also when it has expired");
}

#[test]
fn the_new_one_has_the_wanted_names_and_validity_and_a_new_key() {
    let ca = ca(MADE - DAY, 3_650 * DAY);
    let now = MADE + 61 * DAY;
    let made = renewed(&ca.cert, &ca, now).unwrap().unwrap();
    let until = now - SKEW + 90 * DAY;
    assert_eq!(
        validity(&first(&made.cert).unwrap()),
        Ok((now - SKEW, until))
    );
    assert!(
        names()
            .iter()
            .all(|name| trusts(&ca.cert, &made, name, now))
    );
    assert!(!trusts(&ca.cert, &made, &names()[0], until + 1));
    assert!(
        !trusts(&ca.cert, &made, "any.name", now),
        "whoever may write a Secret chooses no name"
    );
    let key = PrivateKeyDer::from_pem_slice(made.key.as_bytes()).unwrap();
    let chain = vec![first(&made.cert).unwrap()];
    rustls::ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .expect("the key is that of the certificate");
    let again = renewed(&ca.cert, &ca, now).unwrap();
    assert_ne!(again.unwrap().key, made.key);
}

#[test]
fn a_ca_signs_nothing_that_pods_may_not_trust_yet_or_that_outlives_it() {
    let old = ca(MADE - DAY, 3_650 * DAY);
    let now = MADE + 70 * DAY;
    let young = ca(now - CA_AGE_MIN + 1, 3_650 * DAY);
    let both = format!("{}{}", young.cert, old.cert);
    assert_eq!(renewed(&both, &young, now), Ok(None));
    assert!(renewed(&both, &young, now + 1).unwrap().is_some());
    let untrusted = renewed(&old.cert, &young, now + 1);
    assert!(untrusted.unwrap_err().contains("ca.crt"));

    let short = ca(MADE - DAY, 80 * DAY);
    let made = renewed(&short.cert, &short, now).unwrap().unwrap();
    let (_, until) = validity(&first(&made.cert).unwrap()).unwrap();
    assert_eq!(until, MADE + 79 * DAY);
    let over = renewed(&short.cert, &short, MADE + 79 * DAY);
    assert!(over.unwrap_err().contains("expired"));
}

#[test]
fn what_is_no_certificate_or_no_key_is_refused_with_a_reason() {
    let good = ca(MADE - DAY, 3_650 * DAY);
    let no_key = TlsPair {
        key: KeyPair::generate().unwrap().serialize_pem(),
        ..good.clone()
    };
    let wanted = WantedCertificate {
        names: &names(),
        days: 90,
    };
    let valid = present();
    for (present, ca) in [("", &good), ("junk", &good), (valid.as_str(), &no_key)] {
        assert!(renew(present, &good.cert, &wanted, ca, MADE).is_err());
    }
}
