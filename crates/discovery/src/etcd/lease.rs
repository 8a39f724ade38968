//! A lease in etcd: the key `<prefix>/leaders/<name>` with the holder as its value. This lease does
//! not use the leases of etcd: it expires when its value stops changing.

use futures::future::BoxFuture;

use super::api::{self, kv_client::KvClient};
use super::connection::{EtcdConfig, EtcdConnection, within};
use crate::lease::{LeaseRecord, LeaseStore};

/// A lease in etcd.
#[derive(Clone, Debug)]
pub struct EtcdLease {
    connection: EtcdConnection,
    key: Vec<u8>,
}

// === impl EtcdLease ===

impl EtcdLease {
    /// Returns the lease with this name.
    ///
    /// # Errors
    /// Fails if the name is invalid, if no endpoint is given, or if an endpoint or a certificate is
    /// invalid.
    pub fn new(config: EtcdConfig, name: &str) -> Result<Self, String> {
        let name = crate::backend::checked_name(name).map_err(|e| e.to_string())?;
        let connection = EtcdConnection::open(config)?;
        let key = format!("{}/leaders/{name}", connection.prefix).into_bytes();
        Ok(Self { connection, key })
    }

    async fn look(&self) -> Result<Option<LeaseRecord>, tonic::Status> {
        let ask = api::RangeRequest {
            key: self.key.clone(),
            range_end: Vec::new(),
            limit: 1,
            ..api::RangeRequest::default()
        };
        let mut kv = KvClient::new(self.connection.channel.clone());
        let found = within(kv.range(self.connection.request(ask, true).await?))
            .await?
            .kvs
            .into_iter()
            .next();
        Ok(found.map(|kv| {
            let (holder, transitions) = parsed(&kv.value);
            LeaseRecord {
                holder,
                version: kv.mod_revision.to_string(),
                transitions,
            }
        }))
    }

    async fn swap(
        &self,
        holder: &str,
        expected: Option<&LeaseRecord>,
    ) -> Result<Option<LeaseRecord>, tonic::Status> {
        let revision = expected
            .and_then(|seen| seen.version.parse().ok())
            .unwrap_or(0); // 0: the key does not exist
        let transitions = expected.map_or(0, |seen| {
            seen.transitions + u32::from(seen.holder != holder)
        });
        let compare = api::Compare {
            result: api::compare::CompareResult::Equal.into(),
            target: api::compare::CompareTarget::Mod.into(),
            key: self.key.clone(),
            target_union: Some(api::compare::TargetUnion::ModRevision(revision)),
        };
        let put = api::PutRequest {
            key: self.key.clone(),
            value: format!("{transitions} {holder}").into_bytes(),
            lease: 0,
        };
        let put = api::RequestOp {
            request: Some(api::request_op::Request::RequestPut(put)),
        };
        let swap = api::TxnRequest {
            compare: vec![compare],
            success: vec![put],
        };
        let mut kv = KvClient::new(self.connection.channel.clone());
        let done = within(kv.txn(self.connection.request(swap, true).await?)).await?;
        let version = done.header.map_or(0, |header| header.revision).to_string();
        Ok(done.succeeded.then(|| LeaseRecord {
            holder: holder.to_owned(),
            version,
            transitions,
        }))
    }
}

/// Reads `<transitions> <holder>`; any other text is the holder.
fn parsed(value: &[u8]) -> (String, u32) {
    let text = String::from_utf8_lossy(value);
    match text
        .split_once(' ')
        .and_then(|(count, holder)| Some((holder.to_owned(), count.parse().ok()?)))
    {
        Some(both) => both,
        None => (text.into_owned(), 0),
    }
}

impl LeaseStore for EtcdLease {
    fn read(&self) -> BoxFuture<'_, Result<Option<LeaseRecord>, String>> {
        Box::pin(async move {
            match self.look().await {
                Ok(seen) => Ok(seen),
                Err(status) => Err(self.connection.failed(status).await),
            }
        })
    }

    fn write<'a>(
        &'a self,
        holder: &'a str,
        expected: Option<&'a LeaseRecord>,
    ) -> BoxFuture<'a, Result<Option<LeaseRecord>, String>> {
        Box::pin(async move {
            match self.swap(holder, expected).await {
                Ok(seen) => Ok(seen),
                Err(status) => Err(self.connection.failed(status).await),
            }
        })
    }
}
