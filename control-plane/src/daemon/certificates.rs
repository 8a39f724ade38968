//! Renews certificates that the Helm chart made, while this daemon leads.
//!
//! ```text
//!  Secret of a leaf ── two thirds of its time are over ──▶ new certificate, signed by the chart's CA
//!       ▲                                                              │
//!       └──────────────────── written, unless it has changed ──────────┘
//! ```
//! The kubelet writes the Secret into the pods that mount it; this daemon's listeners and the
//! proxies read the files again when they change.

use clap::Args;
use discovery::kubernetes::{self, KubernetesSecrets, SecretName};
use tokio::time::Duration;

use crate::error::FatalError;
use crate::shutdown::Shutdown;
use crate::state::life::unix_ms;

mod renewal;

use renewal::{TlsPair, renew};

/// How often the Secrets are read: a certificate of a day is renewed in time, too.
const CHECK_INTERVAL: Duration = Duration::from_secs(3_600);

/// How soon they are read again if one could not be read or written.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// The annotation by which the chart knows the age of a certificate, in days since 1970.
const MADE_ON_DAY: &str = "switchpoint/made-on-day";

/// Renewal of certificates in Kubernetes.
#[derive(Clone, Debug, Default, Args)]
pub struct RenewalArgs {
    /// While this daemon leads, renew the certificates in these Secrets (`tls.crt`, `tls.key`,
    /// `ca.crt`) when two thirds of their time are over. The Helm chart sets it.
    #[arg(
        long,
        env = "SWITCHPOINT_RENEW_CERTIFICATES",
        value_name = "NAMESPACE/NAME",
        value_delimiter = ',',
        requires = "renew_certificates_ca"
    )]
    pub renew_certificates: Vec<SecretName>,

    /// The Secret with the CA that signs them (`tls.crt`, `tls.key`), as the Helm chart makes it.
    #[arg(
        long,
        env = "SWITCHPOINT_RENEW_CERTIFICATES_CA",
        value_name = "NAMESPACE/NAME",
        requires = "renew_certificates"
    )]
    pub renew_certificates_ca: Option<SecretName>,
}

/// The Secrets of the certificates that the leader renews.
#[derive(Clone, Debug)]
pub struct CertificateRenewal {
    secrets: KubernetesSecrets,
    leaves: Vec<SecretName>,
    ca: SecretName,
}

// === impl RenewalArgs ===

impl RenewalArgs {
    /// Connects to Kubernetes, if there is something to renew.
    ///
    /// # Errors
    /// [`FatalError::Usage`] if there is no configuration of Kubernetes.
    pub async fn connect(self) -> Result<Option<CertificateRenewal>, FatalError> {
        let Some(ca) = self.renew_certificates_ca else {
            return Ok(None);
        };
        let client = kubernetes::connect().await.map_err(FatalError::Usage)?;
        Ok(Some(CertificateRenewal {
            secrets: KubernetesSecrets::new(client),
            leaves: self.renew_certificates,
            ca,
        }))
    }
}

// === impl CertificateRenewal ===

impl CertificateRenewal {
    /// Looks after the certificates until `shutdown`.
    pub async fn run(self, mut shutdown: Shutdown) {
        loop {
            let mut next = CHECK_INTERVAL;
            for leaf in &self.leaves {
                match self.check(leaf).await {
                    Ok(true) => tracing::info!(secret = %leaf, "renewed a certificate"),
                    Ok(false) => {}
                    Err(why) => {
                        tracing::error!(secret = %leaf, why, "cannot look after a certificate now");
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

    /// Renews the certificate in that Secret if it is due. Reads the CA in any case, so that
    /// missing rights show before they are needed.
    async fn check(&self, leaf: &SecretName) -> Result<bool, String> {
        let of_ca = |why: String| format!("{}: {why}", self.ca);
        let authority = self.secrets.read(&self.ca).await.map_err(of_ca)?;
        let ca = TlsPair {
            cert: authority.text("tls.crt").map_err(of_ca)?.to_owned(),
            key: authority.text("tls.key").map_err(of_ca)?.to_owned(),
        };
        let found = self.secrets.read(leaf).await?;
        let now = unix_ms() / 1_000;
        let Some(made) = renew(found.text("tls.crt")?, found.text("ca.crt")?, &ca, now)? else {
            return Ok(false);
        };
        let written = found.with(
            [("tls.crt", made.cert), ("tls.key", made.key)],
            (MADE_ON_DAY, (now / 86_400).to_string()),
        );
        self.secrets.write(leaf, written).await.map(|()| true)
    }
}
