//! Clients of other programs' HTTP.

use reqwest::{Client, ClientBuilder};

/// Builds the client that `described` describes. Where the system has no CA certificates, as in a minimal image, it is one that trusts no https server: the
/// library wants certificates at once, and most engines speak plain HTTP.
///
/// # Errors
/// Those of the library, if the description is at fault.
pub fn build(described: impl Fn() -> ClientBuilder) -> Result<Client, reqwest::Error> {
    // Already installed is as good: every user in this process installs the same. The library wants one for plain HTTP too.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let error = match described().build() {
        Ok(client) => return Ok(client),
        Err(error) => error,
    };
    match described().tls_certs_only([]).build() {
        Ok(client) => {
            tracing::warn!("this system has no CA certificates: no https server is trusted, unless its CA is given");
            Ok(client)
        }
        Err(_) => Err(error),
    }
}
