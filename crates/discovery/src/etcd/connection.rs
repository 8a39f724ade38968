//! A connection to etcd, with the user's token and deadlines.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Mutex;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status};

use super::api::{self, auth_client::AuthClient};
use crate::backend::Component;

/// The default prefix of the keys of instances.
pub const PREFIX_DEFAULT: &str = "/switchpoint/instances";

/// The interval at which the connection is pinged.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);

/// The maximum time that a ping may take.
pub const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum time that one request may take. A keep-alive has to fit into a third of the lease.
pub(super) const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// The addresses, the key prefix and the credentials for etcd.
#[derive(Clone, Debug, Default)]
pub struct EtcdConfig {
    /// The members of the cluster, as `http://host:port` or `https://host:port`.
    pub endpoints: Vec<String>,
    /// The prefix of the keys of instances; [`PREFIX_DEFAULT`] when empty.
    pub prefix: String,
    /// The user and the password, if etcd demands them.
    pub user: Option<(String, String)>,
    /// The CA that signed the members' certificates, PEM.
    pub ca: Option<Vec<u8>>,
    /// The client certificate and its key, PEM.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub(super) struct EtcdConnection {
    pub(super) channel: Channel,
    pub(super) prefix: Arc<str>,
    user: Option<(String, String)>,
    /// The token of the user. The connection renews the token when etcd refuses it.
    token: Arc<Mutex<Option<MetadataValue<tonic::metadata::Ascii>>>>,
}

// === impl EtcdConnection ===

impl EtcdConnection {
    pub(super) fn open(config: EtcdConfig) -> Result<Self, String> {
        let EtcdConfig {
            endpoints,
            prefix,
            user,
            ca,
            identity,
        } = config;
        let mut tls = ClientTlsConfig::new();
        tls = ca
            .into_iter()
            .fold(tls, |tls, ca| tls.ca_certificate(Certificate::from_pem(ca)));
        tls = identity.into_iter().fold(tls, |tls, (cert, key)| {
            tls.identity(Identity::from_pem(cert, key))
        });
        let mut members = Vec::new();
        for given in endpoints {
            let wrong = |e: tonic::transport::Error| format!("etcd endpoint {given:?}: {e}");
            let mut member = Endpoint::from_shared(given.clone()).map_err(wrong)?;
            if given.starts_with("https://") {
                member = member.tls_config(tls.clone()).map_err(wrong)?;
            }
            let member = member.connect_timeout(REQUEST_DEADLINE).tcp_nodelay(true);
            members.push(
                member
                    .http2_keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .keep_alive_while_idle(true),
            );
        }
        let channel = match members.as_slice() {
            [] => return Err("no etcd endpoint is given".to_owned()),
            [one] => one.connect_lazy(),
            _ => Channel::balance_list(members.into_iter()),
        };
        let prefix = if prefix.is_empty() {
            PREFIX_DEFAULT
        } else {
            prefix.trim_end_matches('/')
        };
        Ok(Self {
            channel,
            prefix: prefix.into(),
            user,
            token: Arc::default(),
        })
    }

    /// Returns the prefix of a component's keys. The prefix ends in a slash, so that `a` does not
    /// match `ab`.
    pub(super) fn folder(&self, component: &Component) -> String {
        format!(
            "{}/{}/{}/",
            self.prefix,
            component.namespace(),
            component.name()
        )
    }

    /// Creates a request with the token of the user, if there is one. If `unary`, the request gets
    /// a deadline.
    pub(super) async fn request<T>(&self, message: T, unary: bool) -> Result<Request<T>, Status> {
        let mut request = Request::new(message);
        if unary {
            request.set_timeout(REQUEST_DEADLINE);
        }
        // With this key, a member without a leader refuses the request. Without the key, the member
        // would answer from old state.
        request
            .metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        if let Some((name, password)) = &self.user {
            let mut token = self.token.lock().await;
            if token.is_none() {
                let ask = api::AuthenticateRequest {
                    name: name.clone(),
                    password: password.clone(),
                };
                let answer =
                    within(AuthClient::new(self.channel.clone()).authenticate(ask)).await?;
                *token = answer.token.parse().ok();
            }
            if let Some(token) = &*token {
                request.metadata_mut().insert("token", token.clone());
            }
        }
        Ok(request)
    }

    /// Returns the error as text. Also drops the token, which may have expired.
    pub(super) async fn failed(&self, status: Status) -> String {
        *self.token.lock().await = None;
        let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&status);
        let mut text = format!("etcd: {}", status.message());
        while let Some(error) = cause {
            text = format!("{text}: {error}");
            cause = error.source();
        }
        text
    }
}

/// Returns the answer, if it arrives within [`REQUEST_DEADLINE`].
pub(super) async fn within<T>(
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    let answer = tokio::time::timeout(REQUEST_DEADLINE, answer).await;
    Ok(answer
        .map_err(|_| Status::deadline_exceeded(format!("no answer within {REQUEST_DEADLINE:?}")))??
        .into_inner())
}
