//! HTTP clients for requests to other programs.

use std::error::Error;

use reqwest::{Client, ClientBuilder, Response};

/// Builds the client that the function `described` describes. reqwest loads the system's CA
/// certificates for the client. If the system has no CA certificates, as in a minimal image, the
/// client trusts no https server, which does not matter for engines with plain HTTP.
///
/// # Errors
/// Returns the error of reqwest, if the description is invalid.
pub fn build(described: impl Fn() -> ClientBuilder) -> Result<Client, reqwest::Error> {
    // An error means that a provider is already installed, and it is the same provider. reqwest
    // needs a provider even for plain HTTP.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let error = match described().build() {
        Ok(client) => return Ok(client),
        Err(error) => error,
    };
    match described().tls_certs_only([]).build() {
        Ok(client) => {
            tracing::warn!(
                "this system has no CA certificates: https servers are trusted only if their CA is configured"
            );
            Ok(client)
        }
        Err(_) => Err(error),
    }
}

/// Reads a body; `None` if it has more than `bytes_max` bytes.
///
/// # Errors
/// Returns the error of reqwest, if the body is not complete.
pub async fn body(
    mut response: Response,
    bytes_max: usize,
) -> Result<Option<Vec<u8>>, reqwest::Error> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > bytes_max {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

/// Returns the innermost cause of an error, because the outer causes repeat the URL.
#[must_use]
pub fn cause(error: &reqwest::Error) -> String {
    let mut innermost: &dyn Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
