//! TLS on the listeners: which clients may connect, and certificates that change.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proto::state::{self, daemon_message::Message, proxy_message};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::calls::CallClient;
use super::harness::{
    Daemon, EnvoyStream, FilterStream, assignments, daemon, get, names, until, write,
};

pub(super) struct TlsAuthority {
    pub(super) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl TlsAuthority {
    pub(super) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// Returns a certificate for `localhost` and its key, in PEM.
    fn sign(&self) -> (String, String) {
        self.sign_for("localhost")
    }

    /// Returns a certificate for the DNS name `name` and its key, in PEM.
    fn sign_for(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()])
            .unwrap()
            .signed_by(&key, &self.issuer)
            .unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    pub(super) fn put(&self, folder: &Path) -> (PathBuf, PathBuf) {
        let (certificate, key) = self.sign();
        let cert_file = folder.join("cert.pem");
        let key_file = folder.join("key.pem");
        write(&key_file, &key);
        write(&cert_file, &certificate);
        (cert_file, key_file)
    }
}

pub(super) fn tls(server: &TlsAuthority, client: Option<&TlsAuthority>) -> ClientTlsConfig {
    let config = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&server.pem))
        .domain_name("localhost");
    match client {
        None => config,
        Some(authority) => {
            let (certificate, key) = authority.sign();
            config.identity(Identity::from_pem(certificate, key))
        }
    }
}

pub(super) async fn connect(
    address: std::net::SocketAddr,
    tls: ClientTlsConfig,
) -> Result<Channel, tonic::transport::Error> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    Endpoint::from_shared(format!("https://localhost:{}", address.port()))
        .unwrap()
        .tls_config(tls)?
        .connect()
        .await
}

/// Returns whether a client with this TLS configuration gets a pool update.
pub(super) async fn served(address: std::net::SocketAddr, tls: ClientTlsConfig) -> bool {
    let Ok(channel) = connect(address, tls).await else {
        return false;
    };
    let Ok(filter) = FilterStream::over(channel).await else {
        return false;
    };
    let mut filter = filter;
    filter.hello(proto::SCHEMA, "n", 1, &["default"]).await;
    if !matches!(filter.inbound.message().await, Ok(Some(_))) {
        return false;
    }
    names(&filter.pool_update().await) == ["127.0.0.1:1"]
}

#[tokio::test]
async fn only_clients_of_the_right_authority_are_served() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let theirs = TlsAuthority::new();
    let (cert, key) = ours.put(folder.path());
    let ca = folder.path().join("ca.pem");
    write(&ca, &ours.pem);
    let [cert, key, ca] = [&cert, &key, &ca].map(|p| p.to_str().unwrap());
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--state-tls-cert",
        cert,
        "--state-tls-key",
        key,
        "--state-tls-client-ca",
        ca,
    ])
    .await;
    assert!(served(daemon.state_address, tls(&ours, Some(&ours))).await);
    assert!(
        !served(daemon.state_address, tls(&ours, None)).await,
        "a client without a certificate"
    );
    assert!(
        !served(daemon.state_address, tls(&ours, Some(&theirs))).await,
        "a client of another authority"
    );
    assert!(
        !served(daemon.state_address, tls(&theirs, Some(&ours))).await,
        "a client that does not trust us"
    );
    let plain = Channel::from_shared(format!("http://{}", daemon.state_address))
        .unwrap()
        .connect()
        .await;
    let refused = match plain {
        Err(_) => true,
        Ok(channel) => FilterStream::over(channel).await.is_err(),
    };
    assert!(refused, "a plaintext client");
    assert!(
        served(daemon.state_address, tls(&ours, Some(&ours))).await,
        "a proper client is still served"
    );
    daemon.stop().await;
}

/// Starts a daemon with the pools `a` and `b` that requires client certificates from `authority`.
async fn with_two_pools(authority: &TlsAuthority, folder: &Path, names: &str) -> Daemon {
    let (cert, key) = authority.put(folder);
    let ca = folder.join("ca.pem");
    write(&ca, &authority.pem);
    let pools = folder.join("pools.yaml");
    let pool = |name: &str| format!("- {{name: {name}, endpoints: ['10.0.0.1:1']}}\n");
    write(&pools, &format!("pools:\n{}{}", pool("a"), pool("b")));
    let [cert, key, ca, pools] = [&cert, &key, &ca, &pools].map(|p| p.to_str().unwrap());
    let mut arguments = vec!["--pools", pools, "--state-tls-cert", cert];
    arguments.extend(["--state-tls-key", key, "--state-tls-client-ca", ca]);
    if !names.is_empty() {
        arguments.extend(["--state-tls-client-names", names]);
    }
    daemon(&arguments).await
}

/// Connects with this certificate, requests the pools `a` and `b`, and returns the Welcome.
async fn welcomed(
    daemon: &Daemon,
    authority: &TlsAuthority,
    pair: (String, String),
) -> Option<(FilterStream, state::Welcome)> {
    let identity = Identity::from_pem(pair.0, pair.1);
    let channel = connect(
        daemon.state_address,
        tls(authority, None).identity(identity),
    );
    let mut filter = FilterStream::over(channel.await.ok()?).await.ok()?;
    if !filter.introduce("n", &["a", "b"]).await {
        return None;
    }
    let welcome = filter.inbound.message().await.ok()??.message?;
    let Message::Welcome(welcome) = welcome else {
        panic!("not a welcome: {welcome:?}")
    };
    Some((filter, welcome))
}

#[tokio::test]
async fn a_certificate_has_the_pools_of_its_name_and_the_refusal_of_one_leaves_the_others() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "gateway,a=team-a").await;
    for (name, refused, served) in [
        ("team-a", &["b"][..], Some("a")),
        ("stranger", &["a", "b"], None),
        ("gateway", &[], Some("a")),
    ] {
        let (mut filter, welcome) = welcomed(&daemon, &ours, ours.sign_for(name)).await.unwrap();
        assert_eq!(welcome.refused_pools, refused, "{name}");
        assert!(welcome.unknown_pools.is_empty());
        if let Some(pool) = served {
            assert_eq!(filter.pool_update().await.pool, pool, "{name}");
        }
        let sent = pools_of_messages(&mut filter).await;
        let has_its_own = served.is_none_or(|pool| sent.contains(pool));
        assert!(
            has_its_own && refused.iter().all(|pool| !sent.contains(*pool)),
            "{name} gets {sent:?}"
        );
    }
    let (_, page) = get(daemon.admin_address, "/metrics").await;
    assert!(page.contains("switchpoint_pools_refused_total 3"), "{page}");
    daemon.stop().await;
}

/// Reports load of both pools, and returns the pools of all messages that come within half a
/// second. In this time, the daemon sends metrics of a pool at least once.
async fn pools_of_messages(filter: &mut FilterStream) -> BTreeSet<String> {
    for pool in ["a", "b"] {
        let report = state::LoadReport {
            pool: pool.to_owned(),
            ..state::LoadReport::default()
        };
        filter.say(proxy_message::Message::LoadReport(report)).await;
    }
    let mut pools = BTreeSet::new();
    let reads = async {
        while let Ok(message) = filter.next().await {
            pools.extend(pool_of(&message).map(str::to_owned));
        }
    };
    let _ = tokio::time::timeout(Duration::from_millis(500), reads).await;
    pools
}

/// Returns the pool that a message of the daemon is about.
fn pool_of(message: &Message) -> Option<&str> {
    match message {
        Message::PoolUpdate(of) => Some(&of.pool),
        Message::Metrics(of) => Some(&of.pool),
        Message::PeerLoad(of) => Some(&of.pool),
        Message::LearnedModels(of) => Some(&of.pool),
        Message::Welcome(_) => None,
    }
}

#[tokio::test]
async fn a_certificate_has_the_pools_of_its_name_over_http_calls_too() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "gateway,a=team-a").await;
    for (process_id, name, refused, served) in [
        (1, "team-a", &["b"][..], &["a"][..]),
        (2, "stranger", &["a", "b"], &[]),
        (3, "gateway", &[], &["a", "b"]),
    ] {
        let certificate = ours.sign_for(name);
        let address = daemon.state_address;
        let caller = CallClient::with_certificate(address, &ours.pem, &certificate, process_id);
        let hello = state::Hello {
            schema: proto::SCHEMA,
            node_id: "n".to_owned(),
            process_id,
            pools: vec!["a".to_owned(), "b".to_owned()],
            ..state::Hello::default()
        };
        let (status, _) = caller
            .tell(vec![proxy_message::Message::Hello(hello)])
            .await;
        assert_eq!(status, 200, "{name}");
        let mut pools = BTreeSet::new();
        let mut refused_pools = None;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(500) || pools.len() < served.len() {
            for message in caller.hear().await.unwrap() {
                pools.extend(pool_of(&message).map(str::to_owned));
                if let Message::Welcome(welcome) = message {
                    refused_pools = Some(welcome.refused_pools);
                }
            }
        }
        assert_eq!(refused_pools.unwrap(), refused, "{name}");
        assert!(pools.iter().eq(served), "{name} gets {pools:?}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn an_envoy_gets_the_endpoints_of_its_certificate_only() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "gateway,a=team-a").await;
    for (name, served) in [("team-a", &["a"][..]), ("gateway", &["a", "b"])] {
        let (certificate, key) = ours.sign_for(name);
        let identity = Identity::from_pem(certificate, key);
        let tls = tls(&ours, None).identity(identity);
        let channel = connect(daemon.state_address, tls).await.unwrap();
        let mut envoy = EnvoyStream::mute(channel).await;
        envoy.send("", None, &["a", "b"]).await;
        let mut pools = Vec::new();
        while let Some(response) = envoy.within(Duration::from_millis(500)).await {
            pools.extend(assignments(&response).into_iter().map(|a| a.cluster_name));
            envoy.send(&response.nonce, None, &["a", "b"]).await;
        }
        pools.sort();
        pools.dedup();
        assert_eq!(pools, served, "{name}");
    }
    let (_, page) = get(daemon.admin_address, "/metrics").await;
    assert!(page.contains("switchpoint_pools_refused_total 1"), "{page}");
    daemon.stop().await;
}

#[tokio::test]
async fn each_pool_has_its_own_hash_secret() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "").await;
    let secrets = async || {
        let (mut filter, _) = welcomed(&daemon, &ours, ours.sign()).await.unwrap();
        let mut secrets = BTreeMap::new();
        while secrets.len() < 2 {
            let update = filter.pool_update().await;
            secrets.insert(update.pool, (update.hash_secret_high, update.hash_secret));
        }
        secrets
    };
    let first = secrets().await;
    assert_ne!(first["a"], first["b"]);
    assert_eq!(secrets().await, first);
    daemon.stop().await;
}

/// Checks that the daemon refuses its present certificate as a client's certificate.
/// `--state-tls-client-names` excludes earlier certificates of the daemon.
#[tokio::test]
async fn the_certificate_of_the_daemon_is_no_client() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "").await;
    let own = ["cert.pem", "key.pem"]
        .map(|file| std::fs::read_to_string(folder.path().join(file)).unwrap());
    let own: (String, String) = own.into();
    assert!(welcomed(&daemon, &ours, own).await.is_none());
    assert!(welcomed(&daemon, &ours, ours.sign()).await.is_some());
    daemon.stop().await;
}

/// Checks the replacement of a CA: at first the daemon trusts both CAs, then only the new CA.
#[tokio::test]
async fn certificates_of_clients_rotate_while_the_daemon_runs() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let next = TlsAuthority::new();
    let daemon = with_two_pools(&ours, folder.path(), "proxy").await;
    let (mut open, _) = welcomed(&daemon, &ours, ours.sign_for("proxy"))
        .await
        .unwrap();
    assert!(
        welcomed(&daemon, &ours, next.sign_for("proxy"))
            .await
            .is_none()
    );
    write(
        &folder.path().join("ca.pem"),
        &[&*ours.pem, &*next.pem].concat(),
    );
    until("a client of the next CA is served", async || {
        welcomed(&daemon, &ours, next.sign_for("proxy"))
            .await
            .is_some()
    })
    .await;
    write(&folder.path().join("ca.pem"), &next.pem);
    until("a client of the former CA is refused", async || {
        welcomed(&daemon, &ours, ours.sign_for("proxy"))
            .await
            .is_none()
    })
    .await;
    assert!(open.next().await.is_ok(), "open streams go on");
    daemon.stop().await;
}

#[tokio::test]
async fn certificates_are_read_again_when_they_change() {
    let folder = TempDir::new().unwrap();
    let old = TlsAuthority::new();
    let new = TlsAuthority::new();
    let (cert, key) = old.put(folder.path());
    let [cert, key] = [&cert, &key].map(|p| p.to_str().unwrap());
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--state-tls-cert",
        cert,
        "--state-tls-key",
        key,
    ])
    .await;
    assert!(served(daemon.state_address, tls(&old, None)).await);
    assert!(!served(daemon.state_address, tls(&new, None)).await);
    new.put(folder.path());
    until("the new certificate is shown", || {
        served(daemon.state_address, tls(&new, None))
    })
    .await;
    std::fs::write(folder.path().join("cert.pem"), "garbage").unwrap();
    // The pause is longer than the interval of the file watcher.
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert!(
        served(daemon.state_address, tls(&new, None)).await,
        "garbage does not replace a certificate"
    );
    daemon.stop().await;
}

#[tokio::test]
async fn the_admin_listener_has_its_own_tls() {
    let folder = TempDir::new().unwrap();
    let ours = TlsAuthority::new();
    let (cert, key) = ours.put(folder.path());
    let [cert, key] = [&cert, &key].map(|p| p.to_str().unwrap());
    let daemon = daemon(&[
        "--endpoint",
        "127.0.0.1:1",
        "--admin-tls-cert",
        cert,
        "--admin-tls-key",
        key,
    ])
    .await;
    let _ = rustls::crypto::ring::default_provider().install_default();
    let authority = reqwest::Certificate::from_pem(ours.pem.as_bytes()).unwrap();
    let client = reqwest::Client::builder()
        .tls_certs_only([authority])
        .build()
        .unwrap();
    let response = client
        .get(format!(
            "https://localhost:{}/livez",
            daemon.admin_address.port()
        ))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    assert!(
        client
            .get(format!(
                "http://localhost:{}/livez",
                daemon.admin_address.port()
            ))
            .send()
            .await
            .is_err()
    );
    daemon.stop().await;
}
