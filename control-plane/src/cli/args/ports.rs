//! Access to the state and admin listeners.

use std::path::PathBuf;

use clap::Args;

use crate::state::client_names::ClientName;

/// TLS of the state listener; without these options it is plaintext.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "TLS of the state listener")]
pub struct StateTls {
    /// Certificate with its chain, PEM; read again when it changes.
    #[arg(
        long,
        env = "SWITCHPOINT_STATE_TLS_CERT",
        value_name = "FILE",
        requires = "state_tls_key"
    )]
    pub state_tls_cert: Option<PathBuf>,

    /// The private key of the listener's certificate, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_STATE_TLS_KEY",
        value_name = "FILE",
        requires = "state_tls_cert"
    )]
    pub state_tls_key: Option<PathBuf>,

    /// Demand client certificates signed by this CA, PEM. A listener beyond loopback needs this.
    #[arg(
        long,
        env = "SWITCHPOINT_STATE_TLS_CLIENT_CA",
        value_name = "FILE",
        requires = "state_tls_cert"
    )]
    pub state_tls_client_ca: Option<PathBuf>,

    /// Names of client certificates that give access to pools: NAME to every pool, POOL=NAME to one
    /// pool. The name of a certificate is its first URI, else its first DNS name, else its common
    /// name [default: every certificate of the CA gives access to every pool].
    #[arg(
        long,
        env = "SWITCHPOINT_STATE_TLS_CLIENT_NAMES",
        value_name = "[POOL=]NAME",
        value_delimiter = ',',
        requires = "state_tls_client_ca"
    )]
    pub state_tls_client_names: Vec<ClientName>,

    /// Allow --listen-state beyond loopback without mutual TLS. The risk: any host that reaches the
    /// port can read the secret key of the prompt hashes, and so test whether a given prompt was
    /// sent. The host can also have half of the endpoints ejected on every proxy, and exhaust the
    /// daemon's memory.
    #[arg(long, env = "SWITCHPOINT_INSECURE_STATE")]
    pub insecure_state: bool,
}

/// TLS and token of the admin listener. Without these options it has neither.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "TLS and token of the admin listener")]
pub struct AdminTls {
    /// Certificate with its chain, PEM; read again when it changes.
    #[arg(
        long,
        env = "SWITCHPOINT_ADMIN_TLS_CERT",
        value_name = "FILE",
        requires = "admin_tls_key"
    )]
    pub admin_tls_cert: Option<PathBuf>,

    /// The private key of the listener's certificate, PEM.
    #[arg(
        long,
        env = "SWITCHPOINT_ADMIN_TLS_KEY",
        value_name = "FILE",
        requires = "admin_tls_cert"
    )]
    pub admin_tls_key: Option<PathBuf>,

    /// Demand client certificates signed by this CA, PEM. A listener beyond loopback needs this or
    /// a token.
    #[arg(
        long,
        env = "SWITCHPOINT_ADMIN_TLS_CLIENT_CA",
        value_name = "FILE",
        requires = "admin_tls_cert"
    )]
    pub admin_tls_client_ca: Option<PathBuf>,

    /// Demand the token in this file (`authorization: Bearer TOKEN`, at least 16 characters) for
    /// all routes but /livez and /readyz; read again when it changes. Without --admin-tls-cert any
    /// machine on the network path can read the token.
    #[arg(long, env = "SWITCHPOINT_ADMIN_TOKEN_FILE", value_name = "FILE")]
    pub admin_token_file: Option<PathBuf>,

    /// Another name of this machine under which browsers and programs may call the admin listener,
    /// besides the machine's addresses and localhost. Repeat the flag for several names. The flag
    /// is not needed with a token or a certificate. The listener refuses other names, because a web
    /// page could let its own name resolve to this machine and then read all answers.
    #[arg(
        long = "admin-host",
        env = "SWITCHPOINT_ADMIN_HOST",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub admin_hosts: Vec<String>,

    /// Allow --listen-admin beyond loopback without mutual TLS or a token. The risk: any host that
    /// reaches the port can read addresses and load of all endpoints, the configuration and the
    /// names of all proxies, and make the daemon spend CPU on /debug/explain.
    #[arg(long, env = "SWITCHPOINT_INSECURE_ADMIN")]
    pub insecure_admin: bool,
}
