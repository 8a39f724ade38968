//! Endpoints behind TLS, with and without client certificates.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use super::*;

/// A CA, a server with a certificate from this CA, and the files that a client needs.
struct TlsFixture {
    folder: tempfile::TempDir,
    server: ServerConfig,
}

fn pki(clients_need_certificates: bool) -> TlsFixture {
    let folder = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    let client = KeyPair::generate().unwrap();
    let server = KeyPair::generate().unwrap();
    let issue = |key: &KeyPair, name: &str| {
        CertificateParams::new([name.to_owned()])
            .unwrap()
            .signed_by(key, &authority)
            .unwrap()
    };
    write("ca.pem", authority.pem());
    write("client.pem", issue(&client, "switchpoint").pem());
    write("client.key", client.serialize_pem());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = if clients_need_certificates {
        let mut roots = RootCertStore::empty();
        roots.add(authority.der().clone()).unwrap();
        builder.with_client_cert_verifier(
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .unwrap(),
        )
    } else {
        builder.with_no_client_auth()
    };
    let chain: Vec<CertificateDer<'static>> = vec![issue(&server, "127.0.0.1").der().clone()];
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(server.serialize_der()));
    TlsFixture {
        server: builder.with_single_cert(chain, key).unwrap(),
        folder,
    }
}

impl TlsFixture {
    fn path(&self, name: &str) -> PathBuf {
        Path::new(self.folder.path()).join(name)
    }

    /// Serves one page on every connection. Returns the address.
    fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let config = Arc::new(self.server.clone());
        std::thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                let mut stream =
                    StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), socket);
                let mut request = [0; 4096];
                if stream.read(&mut request).is_ok() {
                    let page = page(5, 0, 0.0);
                    let _ = write!(
                        stream,
                        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{page}",
                        page.len()
                    );
                }
            }
        });
        address
    }
}

async fn first_event(address: &str, tls: EndpointTls) -> ScrapeEvent {
    let location = MetricsLocation {
        https: true,
        ..MetricsLocation::default()
    };
    let config = ScrapeConfig { tls, ..config() };
    ScraperHarness::start(
        &config,
        vec![target_at(id(1, 1), address, "vllm", &location)],
    )
    .next()
    .await
}

#[tokio::test]
async fn the_authority_decides_which_servers_are_trusted() {
    let stranger = pki(false);
    let pki = pki(false);
    let address = pki.serve();
    let trusting = |authority: &TlsFixture| EndpointTls {
        ca_file: Some(authority.path("ca.pem")),
        ..EndpointTls::default()
    };
    assert!(matches!(
        first_event(&address, trusting(&pki)).await,
        ScrapeEvent::Metrics(..)
    ));
    assert!(matches!(
        first_event(&address, trusting(&stranger)).await,
        ScrapeEvent::Failed(_, FailReason::Connect(_), 1)
    ));
    assert!(matches!(
        first_event(&address, EndpointTls::default()).await,
        ScrapeEvent::Failed(_, FailReason::Connect(_), 1)
    ));
    let careless = EndpointTls {
        insecure_skip_verify: true,
        ..EndpointTls::default()
    };
    assert!(matches!(
        first_event(&address, careless).await,
        ScrapeEvent::Metrics(..)
    ));
}

#[tokio::test]
async fn endpoints_may_require_a_client_certificate() {
    let pki = pki(true);
    let address = pki.serve();
    let ca_file = Some(pki.path("ca.pem"));
    let identity = Some((pki.path("client.pem"), pki.path("client.key")));
    let known = EndpointTls {
        ca_file: ca_file.clone(),
        identity,
        ..EndpointTls::default()
    };
    assert!(matches!(
        first_event(&address, known).await,
        ScrapeEvent::Metrics(..)
    ));
    let unknown = EndpointTls {
        ca_file,
        ..EndpointTls::default()
    };
    assert!(matches!(
        first_event(&address, unknown).await,
        ScrapeEvent::Failed(..)
    ));
}

#[test]
fn unusable_files_are_named() {
    let pki = pki(false);
    let refusal = |tls: EndpointTls| {
        Scraper::try_new(&ScrapeConfig { tls, ..config() })
            .unwrap_err()
            .to_string()
    };
    assert!(
        refusal(EndpointTls {
            ca_file: Some(pki.path("missing.pem")),
            ..EndpointTls::default()
        })
        .contains("missing.pem")
    );
    assert!(
        refusal(EndpointTls {
            ca_file: Some(pki.path("client.key")),
            ..EndpointTls::default()
        })
        .contains("client.key")
    );
    let keyless = Some((pki.path("client.pem"), pki.path("ca.pem")));
    assert!(
        refusal(EndpointTls {
            identity: keyless,
            ..EndpointTls::default()
        })
        .contains("client.pem")
    );
}
