//! Certificates for tests: a certificate authority and the certificates that it signs.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::Result;

#[derive(Debug)]
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

// === impl Authority ===

impl Authority {
    /// Creates an authority.
    ///
    /// # Errors
    /// Fails if a key or certificate cannot be generated.
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params
            .distinguished_name
            .push(DnType::CommonName, "an authority");
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self {
            pem,
            issuer: Issuer::new(params, key),
        })
    }

    /// Writes a certificate for the DNS name `name` into `<who>.pem`, and its key into `<who>.key`.
    ///
    /// # Errors
    /// Fails if the folder cannot be written.
    pub fn certify(&self, name: &str, who: &str, folder: &Path) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        // Sets a subject that differs from the issuer's, because a certificate with the same
        // subject as its issuer would be treated as self-signed.
        params.distinguished_name.push(DnType::CommonName, name);
        std::fs::write(
            folder.join(who).with_extension("pem"),
            params.signed_by(&key, &self.issuer)?.pem(),
        )?;
        Ok(std::fs::write(
            folder.join(who).with_extension("key"),
            key.serialize_pem(),
        )?)
    }

    /// Creates a folder with `ca.pem`, a certificate for a daemon with this DNS name, and a
    /// certificate for a proxy.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn folder(&self, daemon: &str) -> Result<TempDir> {
        let folder = TempDir::new()?;
        std::fs::write(folder.path().join("ca.pem"), &self.pem)?;
        self.certify(daemon, "daemon", folder.path())?;
        self.certify("a-proxy", "proxy", folder.path())?;
        Ok(folder)
    }
}

/// Returns the arguments of a daemon that requires certificates from proxies. The certificate files
/// are in `certificates`.
pub fn daemon_arguments(certificates: &Path) -> Vec<String> {
    let flags = [
        ("--state-tls-cert", "daemon.pem"),
        ("--state-tls-key", "daemon.key"),
        ("--state-tls-client-ca", "ca.pem"),
    ];
    flags
        .map(|(flag, file)| {
            [
                flag.to_owned(),
                certificates.join(file).display().to_string(),
            ]
        })
        .concat()
}
