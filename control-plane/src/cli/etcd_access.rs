//! Access to etcd: the same options on the command line and for a pool in the pools file.

use std::path::PathBuf;

use clap::Args;
use discovery::etcd::EtcdConfig;
use serde::Deserialize;

/// Credentials for etcd, and the CA that its certificate is checked with.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct EtcdAccess {
    /// Prefix of all keys in etcd.
    #[arg(
        long = "etcd-prefix",
        env = "SWITCHPOINT_ETCD_PREFIX",
        value_name = "TEXT"
    )]
    prefix: Option<String>,

    /// User name in etcd.
    #[arg(
        long = "etcd-user",
        env = "SWITCHPOINT_ETCD_USER",
        value_name = "NAME",
        requires = "password_file"
    )]
    user: Option<String>,

    /// A file that contains only the password of the etcd user.
    #[arg(
        long = "etcd-password-file",
        env = "SWITCHPOINT_ETCD_PASSWORD_FILE",
        value_name = "FILE",
        requires = "user"
    )]
    password_file: Option<PathBuf>,

    /// CA that signed the certificates of etcd, PEM.
    #[arg(long = "etcd-ca", env = "SWITCHPOINT_ETCD_CA", value_name = "FILE")]
    ca_file: Option<PathBuf>,

    /// Client certificate for etcd, PEM.
    #[arg(
        long = "etcd-cert",
        env = "SWITCHPOINT_ETCD_CERT",
        value_name = "FILE",
        requires = "key_file"
    )]
    cert_file: Option<PathBuf>,

    /// The private key of the client certificate, PEM.
    #[arg(
        long = "etcd-key",
        env = "SWITCHPOINT_ETCD_KEY",
        value_name = "FILE",
        requires = "cert_file"
    )]
    key_file: Option<PathBuf>,
}

impl EtcdAccess {
    /// Reads the files and builds the configuration of an etcd client for the members `endpoints`.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or an option is missing. The error names it.
    pub async fn config(self, endpoints: Vec<String>) -> Result<EtcdConfig, String> {
        let Self {
            prefix,
            user,
            password_file,
            ca_file,
            cert_file,
            key_file,
        } = self;
        if user.is_some() != password_file.is_some() || cert_file.is_some() != key_file.is_some() {
            return Err(
                "etcd: a user needs a password file, and a certificate needs its key".to_owned(),
            );
        }
        let read = async |file: Option<PathBuf>| match file {
            Some(path) => discovery::file_watcher::read(&path)
                .await
                .map(Some)
                .map_err(|e| e.to_string()),
            None => Ok(None),
        };
        let password = read(password_file)
            .await?
            .map(|text| text.trim_end().to_owned());
        let identity = read(cert_file).await?.zip(read(key_file).await?);
        Ok(EtcdConfig {
            endpoints,
            prefix: prefix.unwrap_or_default(),
            user: user.zip(password),
            ca: read(ca_file).await?.map(String::into_bytes),
            identity: identity.map(|(cert, key)| (cert.into_bytes(), key.into_bytes())),
        })
    }
}
