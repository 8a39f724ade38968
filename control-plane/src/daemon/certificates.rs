//! Renews certificates that the Helm chart made, while this daemon leads.
//!
//! ```text
//!  Secret of a leaf ── a third of its time is left ──▶ new certificate, signed by the chart's CA
//!       ▲                                                              │
//!       └──────────────────── written, unless it has changed ──────────┘
//! ```
//! The kubelet writes the Secret into the pods that mount it; this daemon's listeners and the
//! proxies read the files again when they change.

use std::str::FromStr;

use clap::Args;
use discovery::kubernetes::{self, KubernetesSecrets, SecretName};
use tokio::time::Duration;

use crate::error::FatalError;
use crate::shutdown::Shutdown;
use crate::state::life::unix_ms;

mod renewal;

use renewal::{TlsPair, WantedCertificate, renew};

/// The interval at which the Secrets are read. With this interval, even a certificate that is valid
/// for one day is renewed in time.
const CHECK_INTERVAL: Duration = Duration::from_secs(3_600);

/// The time after which the Secrets are read again, if a Secret could not be read or written.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The annotation with the day when a certificate was made, in days since 1970. The chart reads
/// this annotation.
const MADE_ON_DAY: &str = "switchpoint/made-on-day";

/// Renewal of certificates in Kubernetes.
#[derive(Clone, Debug, Args)]
pub struct RenewalArgs {
    /// While this daemon leads, renew the certificate in this Secret (`tls.crt`, `tls.key`,
    /// `ca.crt`) when less than a third of its time is left. The new certificate has these DNS
    /// names. The Helm chart sets this option.
    #[arg(
        long,
        env = "SWITCHPOINT_RENEW_CERTIFICATES",
        value_name = "NAMESPACE/NAME=DNS[+DNS]",
        value_delimiter = ',',
        requires = "renew_certificates_ca"
    )]
    pub renew_certificates: Vec<RenewedSecret>,

    /// The Secret with the CA that signs the new certificates (`tls.crt`, `tls.key`), as the Helm
    /// chart makes it.
    #[arg(
        long,
        env = "SWITCHPOINT_RENEW_CERTIFICATES_CA",
        value_name = "NAMESPACE/NAME",
        requires = "renew_certificates"
    )]
    pub renew_certificates_ca: Option<SecretName>,

    /// The validity of the new certificates, in days.
    #[arg(
        long,
        env = "SWITCHPOINT_RENEW_CERTIFICATES_DAYS",
        value_name = "DAYS",
        default_value_t = 90,
        value_parser = clap::value_parser!(u64).range(1..=36_500)
    )]
    pub renew_certificates_days: u64,
}

/// A Secret whose certificate is renewed, and the DNS names of the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenewedSecret {
    secret: SecretName,
    names: Vec<String>,
}

/// The Secrets of the certificates that the leader renews.
#[derive(Clone, Debug)]
pub struct CertificateRenewal {
    secrets: KubernetesSecrets,
    leaves: Vec<RenewedSecret>,
    ca: SecretName,
    days: u64,
}

// === impl RenewalArgs ===

impl RenewalArgs {
    /// Connects to Kubernetes, if there is something to renew.
    ///
    /// # Errors
    /// Returns [`FatalError::Usage`] if there is no client configuration for Kubernetes.
    pub async fn connect(self) -> Result<Option<CertificateRenewal>, FatalError> {
        let Some(ca) = self.renew_certificates_ca else {
            return Ok(None);
        };
        let client = kubernetes::connect().await.map_err(FatalError::Usage)?;
        Ok(Some(CertificateRenewal {
            secrets: KubernetesSecrets::new(client),
            leaves: self.renew_certificates,
            ca,
            days: self.renew_certificates_days,
        }))
    }
}

// === impl RenewedSecret ===

impl FromStr for RenewedSecret {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let (secret, names) = given.split_once('=').ok_or("give NAMESPACE/NAME=DNS")?;
        let names: Vec<String> = names.split('+').map(str::to_owned).collect();
        if names.iter().any(String::is_empty) {
            return Err("a DNS name is empty".to_owned());
        }
        Ok(Self {
            secret: secret.parse()?,
            names,
        })
    }
}

// === impl CertificateRenewal ===

impl CertificateRenewal {
    /// Renews certificates when they are due, until `shutdown`.
    pub async fn run(self, mut shutdown: Shutdown) {
        loop {
            let mut next = CHECK_INTERVAL;
            for leaf in &self.leaves {
                match self.check(leaf).await {
                    Ok(true) => tracing::info!(secret = %leaf.secret, "renewed a certificate"),
                    Ok(false) => {}
                    Err(why) => {
                        tracing::error!(secret = %leaf.secret, why, "cannot check or renew a certificate now");
                        next = RETRY_INTERVAL;
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(next) => {}
                () = shutdown.begun() => return,
            }
        }
    }

    /// Renews the certificate in a Secret if it is due. Reads the CA even if no certificate is due,
    /// so that a missing permission is noticed before a renewal.
    async fn check(&self, leaf: &RenewedSecret) -> Result<bool, String> {
        let of_ca = |why: String| format!("{}: {why}", self.ca);
        let authority = self.secrets.read(&self.ca).await.map_err(of_ca)?;
        let ca = TlsPair {
            cert: authority.text("tls.crt").map_err(of_ca)?.to_owned(),
            key: authority.text("tls.key").map_err(of_ca)?.to_owned(),
        };
        let found = self.secrets.read(&leaf.secret).await?;
        let now = unix_ms() / 1_000;
        let wanted = WantedCertificate {
            names: &leaf.names,
            days: self.days,
        };
        let present = found.text("tls.crt")?;
        let Some(made) = renew(present, found.text("ca.crt")?, &wanted, &ca, now)? else {
            return Ok(false);
        };
        let written = found.with(
            [("tls.crt", made.cert), ("tls.key", made.key)],
            (MADE_ON_DAY, (now / 86_400).to_string()),
        );
        self.secrets
            .write(&leaf.secret, written)
            .await
            .map(|()| true)
    }
}
