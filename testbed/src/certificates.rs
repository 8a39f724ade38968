//! Certificates for tests: an authority, and whom it certifies.

use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::Result;

/// Signs certificates.
#[derive(Debug)]
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

// === impl Authority ===

impl Authority {
    /// A new one.
    ///
    /// # Errors
    /// Those of the library.
    pub fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority");
        let key = KeyPair::generate()?;
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { pem, issuer: Issuer::new(params, key) })
    }

    /// Writes `<who>.pem` and `<who>.key` for this DNS name.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub fn certify(&self, name: &str, who: &str, folder: &Path) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        // Of one subject with its issuer it would pass for signed by itself.
        params.distinguished_name.push(DnType::CommonName, name);
        std::fs::write(folder.join(who).with_extension("pem"), params.signed_by(&key, &self.issuer)?.pem())?;
        Ok(std::fs::write(folder.join(who).with_extension("key"), key.serialize_pem())?)
    }

    /// A folder with `ca.pem`, and certificates of a daemon of this DNS name and of a proxy.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn folder(&self, daemon: &str) -> Result<TempDir> {
        let folder = TempDir::new()?;
        std::fs::write(folder.path().join("ca.pem"), &self.pem)?;
        self.certify(daemon, "daemon", folder.path())?;
        self.certify("a-proxy", "proxy", folder.path())?;
        Ok(folder)
    }
}

/// How a daemon is started that demands certificates of proxies, with those of the folder.
pub fn daemon_arguments(certificates: &Path) -> Vec<String> {
    let flags = [("--state-tls-cert", "daemon.pem"), ("--state-tls-key", "daemon.key"), ("--state-tls-client-ca", "ca.pem")];
    flags.map(|(flag, file)| [flag.to_owned(), certificates.join(file).display().to_string()]).concat()
}
