//! Certificates of listeners. The files are read again when they change, so that certificates
//! rotate without a restart. If new files do not fit together (the key of a certificate has not
//! arrived yet), the old certificates stay in use, and the log says so.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use discovery::file_watcher::{self, FileWatcher};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;

use super::client_verifier::ClientVerifier;
use crate::error::error_text;
use crate::shutdown::Shutdown;

/// The certificate files of one listener.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate with its chain, PEM.
    pub cert: PathBuf,
    /// The server's key, PEM.
    pub key: PathBuf,
    /// The CA of client certificates, PEM. If set, every client must present a certificate other
    /// than the server's own.
    pub client_ca: Option<PathBuf>,
}

/// The protection of a listener.
#[derive(Clone, Debug)]
pub enum ServerTls {
    /// The listener uses plaintext.
    Off,
    /// The listener uses TLS with these files.
    Files(TlsFiles),
    /// The listener uses TLS with a self-signed certificate, which the daemon creates at each
    /// start. Clients cannot verify this certificate. TLS then only prevents others on the network
    /// path from reading.
    SelfSigned,
}

/// Returns the TLS configuration, now and after each change; `None` for plaintext.
pub(super) async fn configuration(
    tls: ServerTls,
    shutdown: &Shutdown,
) -> io::Result<Option<watch::Receiver<Arc<ServerConfig>>>> {
    Ok(match tls {
        ServerTls::Off => None,
        ServerTls::Files(files) => Some(follow(files, shutdown.clone()).await?),
        ServerTls::SelfSigned => {
            Some(watch::channel(Arc::new(self_signed().map_err(io::Error::other)?)).1)
        }
    })
}

/// Reads the files, and again when they change.
async fn follow(
    files: TlsFiles,
    mut shutdown: Shutdown,
) -> io::Result<watch::Receiver<Arc<ServerConfig>>> {
    let (sender, receiver) = watch::channel(Arc::new(
        server_config(&files).await.map_err(io::Error::other)?,
    ));
    let mut follows: Vec<FileWatcher> = [
        Some(&files.cert),
        Some(&files.key),
        files.client_ca.as_ref(),
    ]
    .into_iter()
    .flatten()
    .map(FileWatcher::new)
    .collect();
    // The first content was read just before.
    for follow in &mut follows {
        let _ = follow.changed().await;
    }
    tokio::spawn(async move {
        loop {
            let any =
                futures::future::select_all(follows.iter_mut().map(|f| Box::pin(f.changed())));
            tokio::select! {
                _ = any => {}
                () = shutdown.begun() => return,
            }
            match server_config(&files).await {
                Ok(config) => {
                    sender.send_replace(Arc::new(config));
                    tracing::info!(cert = %files.cert.display(), "new certificates in force");
                }
                Err(why) => {
                    tracing::error!(why, "new certificates cannot be used; the old ones stay");
                }
            }
        }
    });
    Ok(receiver)
}

async fn server_config(files: &TlsFiles) -> Result<ServerConfig, String> {
    let TlsFiles {
        cert,
        key,
        client_ca,
    } = files;
    let chain = certificates(cert).await?;
    let key_pem = file_watcher::read(key).await.map_err(error_text)?;
    let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
        .map_err(|e| format!("{}: {e}", key.display()))?;
    // The result is ignored, because an error only means that a provider is already installed. All
    // code of this process installs the same provider.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = match client_ca {
        None => ServerConfig::builder().with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for authority in certificates(path).await? {
                roots
                    .add(authority)
                    .map_err(|e| format!("{}: {e}", path.display()))?;
            }
            let own = chain.first().ok_or_else(|| empty(cert))?;
            let verifier = ClientVerifier::try_new(roots, own)
                .map_err(|e| format!("{}, {}: {e}", cert.display(), path.display()))?;
            ServerConfig::builder().with_client_cert_verifier(verifier)
        }
    };
    let config = builder
        .with_single_cert(chain, key)
        .map_err(|e| format!("{}: {e}", cert.display()))?;
    Ok(with_protocols(config))
}

fn self_signed() -> Result<ServerConfig, String> {
    let _ = rustls::crypto::ring::default_provider().install_default(); // as above
    let made =
        rcgen::generate_simple_self_signed(["switchpointd".to_owned(), "localhost".to_owned()])
            .map_err(error_text)?;
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der())?;
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key);
    config.map(with_protocols).map_err(error_text)
}

fn with_protocols(mut config: ServerConfig) -> ServerConfig {
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    config
}

async fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = file_watcher::read(path).await.map_err(error_text)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let chain = chain.map_err(|e| format!("{}: {e}", path.display()))?;
    if chain.is_empty() {
        Err(empty(path))
    } else {
        Ok(chain)
    }
}

fn empty(path: &Path) -> String {
    format!("{}: no certificate in it", path.display())
}

// === impl ServerTls ===

impl From<Option<TlsFiles>> for ServerTls {
    fn from(files: Option<TlsFiles>) -> Self {
        files.map_or(Self::Off, Self::Files)
    }
}
