//! Secrets of type `kubernetes.io/tls` that a chart made, read and written by name.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};

/// The name under which the chart's Secrets are written. If Helm found another owner of the same
/// fields, it would refuse to write them.
const FIELD_MANAGER: &str = "helm";

/// The namespace and the name of a Secret, written `NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretName {
    namespace: String,
    name: String,
}

/// A Secret as it was read.
#[derive(Clone, Debug)]
pub struct StoredSecret(Secret);

/// Access to Secrets.
#[derive(Clone)]
pub struct KubernetesSecrets(Client);

// === impl SecretName ===

impl FromStr for SecretName {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        given
            .split_once('/')
            .filter(|(namespace, name)| {
                !namespace.is_empty() && !name.is_empty() && !name.contains('/')
            })
            .map(|(namespace, name)| Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            })
            .ok_or_else(|| "give NAMESPACE/NAME".to_owned())
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

// === impl StoredSecret ===

impl StoredSecret {
    /// Returns the text under this key.
    ///
    /// # Errors
    /// Fails if the key is missing or its value is not text.
    pub fn text(&self, key: &str) -> Result<&str, String> {
        let found = self.0.data.as_ref().and_then(|data| data.get(key));
        let bytes = found.ok_or_else(|| format!("it has no {key}"))?;
        std::str::from_utf8(&bytes.0).map_err(|_| format!("its {key} is no text"))
    }

    /// Returns the value of this annotation.
    #[must_use]
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.0.annotations().get(key).map(String::as_str)
    }

    /// Returns the Secret with other texts under two keys, and with the annotation.
    #[must_use]
    pub fn with(mut self, texts: [(&str, String); 2], annotation: (&str, String)) -> Self {
        let data = self.0.data.get_or_insert_with(BTreeMap::new);
        for (key, text) in texts {
            data.insert(key.to_owned(), ByteString(text.into_bytes()));
        }
        let (key, value) = annotation;
        self.0.annotations_mut().insert(key.to_owned(), value);
        self
    }
}

// === impl KubernetesSecrets ===

impl KubernetesSecrets {
    /// Creates access by this client.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self(client)
    }

    /// Reads a Secret.
    ///
    /// # Errors
    /// Fails if the Secret cannot be read.
    pub async fn read(&self, at: &SecretName) -> Result<StoredSecret, String> {
        let read = self.api(at).get(&at.name).await;
        read.map(StoredSecret).map_err(|e| e.to_string())
    }

    /// Writes a Secret, unless it has changed since it was read.
    ///
    /// # Errors
    /// Fails if the Secret has changed since it was read, or cannot be written.
    pub async fn write(&self, at: &SecretName, secret: StoredSecret) -> Result<(), String> {
        let StoredSecret(Secret {
            metadata,
            data,
            type_,
            ..
        }) = secret;
        // The patch has the fields that Helm writes, and the version that was read. The API server
        // refuses the patch if the Secret now has another version.
        let metadata = ObjectMeta {
            name: metadata.name,
            namespace: metadata.namespace,
            labels: metadata.labels,
            annotations: metadata.annotations,
            resource_version: metadata.resource_version,
            ..ObjectMeta::default()
        };
        let applied = Secret {
            metadata,
            data,
            type_,
            ..Secret::default()
        };
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let written = self
            .api(at)
            .patch(&at.name, &parameters, &Patch::Apply(&applied))
            .await;
        written.map(drop).map_err(|e| e.to_string())
    }

    fn api(&self, at: &SecretName) -> Api<Secret> {
        Api::namespaced(self.0.clone(), &at.namespace)
    }
}

impl fmt::Debug for KubernetesSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KubernetesSecrets").finish_non_exhaustive()
    }
}
