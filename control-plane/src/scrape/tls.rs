//! The HTTP client for endpoints, with TLS as configured.

use std::path::{Path, PathBuf};
use std::time::Duration;

use discovery::file_watcher::FILE_BYTES_MAX;
use discovery::whole_file;
use reqwest::{Certificate, Client, Identity, redirect};

use crate::scrape::http_client;

/// The time for which idle connections are kept. The time is shorter than uvicorn's 5 s, so that no
/// connection is reused just when the server closes it.
const IDLE_CONNECTION_MAX: Duration = Duration::from_secs(4);

/// The maximum number of idle connections to one endpoint. One is enough, because the scrapes of an
/// endpoint never overlap.
const IDLE_CONNECTIONS_PER_ENDPOINT_MAX: usize = 1;

/// The TLS settings for endpoints whose metrics use `https`.
#[derive(Clone, Debug, Default)]
pub struct EndpointTls {
    /// The PEM file with the CAs that endpoints' certificates are checked against; the system's CAs
    /// if unset.
    pub ca_file: Option<PathBuf>,
    /// PEM files with the client certificate chain and its key, for endpoints that request one.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// Whether the client accepts every certificate, for tests and for self-signed engines in a
    /// trusted network.
    pub insecure_skip_verify: bool,
}

/// The reason why no client could be created. The configuration has to change.
#[derive(Debug, thiserror::Error)]
pub enum InvalidTls {
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file has no usable certificate or key.
    #[error("{path}: {source}")]
    Pem {
        path: PathBuf,
        source: reqwest::Error,
    },
    /// A file contains no certificate.
    #[error("{0}: no certificate in it")]
    Empty(PathBuf),
    /// The TLS library refuses the combination of settings.
    #[error("TLS towards endpoints: {0}")]
    Client(#[from] reqwest::Error),
}

/// Creates the client: HTTP/1.1, no redirects, no proxy, no decompression.
pub(super) fn client(tls: &EndpointTls, deadline: Duration) -> Result<Client, InvalidTls> {
    let EndpointTls {
        ca_file,
        identity,
        insecure_skip_verify,
    } = tls;
    let authorities = ca_file.as_deref().map(authorities).transpose()?;
    let identity = identity
        .as_ref()
        .map(|(certificate, key)| shown(certificate, key))
        .transpose()?;
    let described = || {
        let mut builder = Client::builder()
            .http1_only()
            .no_proxy()
            .redirect(redirect::Policy::none())
            .connect_timeout(deadline)
            .pool_idle_timeout(IDLE_CONNECTION_MAX)
            .pool_max_idle_per_host(IDLE_CONNECTIONS_PER_ENDPOINT_MAX)
            .tls_danger_accept_invalid_certs(*insecure_skip_verify);
        if let Some(authorities) = &authorities {
            builder = builder.tls_certs_only(authorities.iter().cloned());
        }
        if let Some(identity) = &identity {
            builder = builder.identity(identity.clone());
        }
        builder
    };
    Ok(http_client::build(described)?)
}

fn authorities(file: &Path) -> Result<Vec<Certificate>, InvalidTls> {
    let authorities =
        Certificate::from_pem_bundle(&read(file)?).map_err(|source| InvalidTls::Pem {
            path: file.into(),
            source,
        })?;
    if authorities.is_empty() {
        Err(InvalidTls::Empty(file.into()))
    } else {
        Ok(authorities)
    }
}

/// Reads the client certificate with its key.
fn shown(certificate: &Path, key: &Path) -> Result<Identity, InvalidTls> {
    let mut pem = read(certificate)?;
    pem.push(b'\n');
    pem.extend(read(key)?);
    Identity::from_pem(&pem).map_err(|source| InvalidTls::Pem {
        path: certificate.into(),
        source,
    })
}

fn read(path: &Path) -> Result<Vec<u8>, InvalidTls> {
    whole_file::read(path, FILE_BYTES_MAX).map_err(|source| InvalidTls::Read {
        path: path.into(),
        source,
    })
}
