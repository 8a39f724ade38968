//! Checks the size and scope of the messages of proxies. The times in them are checked when load
//! reports are read ([`proto::load_report::LoadReportHead::receive`]).
//!
//! A proxy may report only for itself, and only about pools that it requested and that this daemon
//! serves. Parts that exceed these limits are dropped and counted, and the rest of the message is
//! used, because a faulty filter should lose only the faulty part.

use prost::Message as _;
use proto::observation::{OBSERVATION_BYTES, OBSERVATIONS_MAX};
use proto::state::{self, proxy_message};
use proto::{PLACEMENTS_BYTES_MAX, PROXY_MESSAGE_BYTES_MAX};
use tonic::Status;

use crate::state::peer_relay::ROW_BYTES_MAX;

/// The longest node id and pool name accepted, in bytes.
pub const NAME_BYTES_MAX: usize = 1024;

/// The maximum length of a proxy's reason for a refusal that is kept and logged, in bytes.
pub const REASON_BYTES_MAX: usize = 1024;

/// The maximum size of placements and claims in one message from a proxy, in bytes: twice the
/// maximum of a filter.
const SHARE_PLACEMENTS_BYTES_MAX: usize = 2 * PLACEMENTS_BYTES_MAX;

/// The pools that a proxy may report about.
#[derive(Debug)]
pub struct ProxyScope {
    pools: Vec<String>,
}

/// A message from a proxy, within the limits.
#[derive(Debug)]
pub enum AdmittedMessage {
    /// The proxy applied or refused a pool update.
    Ack(state::Ack),
    /// Counters of the proxy's VMs.
    Report(Vec<state::VmCounters>),
    /// The proxy's load and placements.
    Share(state::LoadReport),
    /// Measured times of finished requests.
    Observations(state::Observations),
    /// The learned models that the proxy has.
    Models(state::LearnedModels),
}

/// The result of checking a message.
#[derive(Debug)]
pub struct Admission {
    /// The accepted message; `None` if no part of it is accepted.
    pub message: Option<AdmittedMessage>,
    /// The number of parts that were dropped.
    pub refused: u64,
}

/// Checks the first message of a stream. The returned Hello has the schema that both sides use.
/// [`ClientNames`](crate::state::client_names::ClientNames) decides which of the requested pools
/// the proxy gets.
///
/// # Errors
/// Fails if the Hello breaks a rule of the protocol.
pub fn hello(mut hello: state::Hello) -> Result<state::Hello, Status> {
    let version = env!("CARGO_PKG_VERSION");
    let oldest = proto::SCHEMA_MIN;
    let newest = proto::SCHEMA;
    hello.schema = proto::common_schema(hello.schema).ok_or_else(|| {
        Status::failed_precondition(format!(
            "the filter speaks state schema {}, this daemon (switchpointd {version}) schemas {oldest} to {newest}: run filter and daemon \
             of one release or of two in a row",
            hello.schema
        ))
    })?;
    if hello
        .pools
        .iter()
        .chain([&hello.node_id, &hello.release])
        .any(|name| name.len() > NAME_BYTES_MAX)
    {
        return Err(Status::invalid_argument(format!(
            "a node id, release or pool name is longer than {NAME_BYTES_MAX} bytes"
        )));
    }
    Ok(hello)
}

// === impl ProxyScope ===

impl ProxyScope {
    /// Creates the scope of a proxy with these pools. This daemon serves each of them.
    #[must_use]
    pub fn new(pools: Vec<String>) -> Self {
        Self { pools }
    }

    /// Checks a message.
    ///
    /// # Errors
    /// Returns [`Status::invalid_argument`] if the protocol does not allow the message at this
    /// point.
    pub fn admit(&self, message: state::ProxyMessage) -> Result<Admission, Status> {
        let (said, refused) = match message.message {
            Some(proxy_message::Message::Ack(ack)) => {
                single(self.ack(ack).map(AdmittedMessage::Ack))
            }
            Some(proxy_message::Message::Report(report)) => {
                let parts = report.counters.len();
                let counters: Vec<_> = report
                    .counters
                    .iter()
                    .filter_map(|bytes| self.counters(bytes))
                    .collect();
                let refused = parts - counters.len();
                (
                    Some(AdmittedMessage::Report(counters)),
                    u64::try_from(refused).unwrap_or(u64::MAX),
                )
            }
            Some(proxy_message::Message::LoadReport(share)) => {
                single(self.share(share).map(AdmittedMessage::Share))
            }
            Some(proxy_message::Message::Observations(message)) => single(
                self.observations(message)
                    .map(AdmittedMessage::Observations),
            ),
            Some(proxy_message::Message::LearnedModels(models)) => {
                single(self.models(models).map(AdmittedMessage::Models))
            }
            Some(proxy_message::Message::Hello(_)) => {
                return Err(Status::invalid_argument("a second Hello"));
            }
            None => (None, 0), // a message that only a newer filter and daemon know
        };
        Ok(Admission {
            message: said,
            refused,
        })
    }

    #[must_use]
    pub fn pools(&self) -> &[String] {
        &self.pools
    }

    fn has(&self, pool: &str) -> bool {
        self.pools.iter().any(|name| name == pool)
    }

    fn ack(&self, mut ack: state::Ack) -> Option<state::Ack> {
        ack.refused
            .truncate(ack.refused.floor_char_boundary(REASON_BYTES_MAX));
        self.has(&ack.pool).then_some(ack)
    }

    fn counters(&self, bytes: &[u8]) -> Option<state::VmCounters> {
        let counters = state::VmCounters::decode(bytes).ok()?;
        self.has(&counters.pool).then_some(counters)
    }

    fn share(&self, share: state::LoadReport) -> Option<state::LoadReport> {
        let fits = share.row.len() <= ROW_BYTES_MAX
            && share.placements.len() + share.claims.len() <= SHARE_PLACEMENTS_BYTES_MAX;
        (fits && self.has(&share.pool)).then_some(share)
    }

    fn observations(&self, message: state::Observations) -> Option<state::Observations> {
        let fits = message.rows.len() <= OBSERVATIONS_MAX * OBSERVATION_BYTES;
        (fits && self.has(&message.pool)).then_some(message)
    }

    /// The learner checks the content of the models, if it wants models.
    fn models(&self, models: state::LearnedModels) -> Option<state::LearnedModels> {
        self.has(&models.pool).then_some(models)
    }
}

fn single(said: Option<AdmittedMessage>) -> (Option<AdmittedMessage>, u64) {
    let refused = u64::from(said.is_none());
    (said, refused)
}

const _: () = assert!(
    ROW_BYTES_MAX + SHARE_PLACEMENTS_BYTES_MAX < PROXY_MESSAGE_BYTES_MAX,
    "the largest share fits a message"
);

#[cfg(test)]
mod tests {
    use super::*;

    fn admit(message: proxy_message::Message) -> Admission {
        ProxyScope::new(vec!["p".to_owned()])
            .admit(state::ProxyMessage {
                message: Some(message),
            })
            .unwrap()
    }

    #[test]
    fn what_is_of_another_pool_or_too_large_is_left_out() {
        let vm = |pool: &str| {
            state::VmCounters {
                pool: pool.to_owned(),
                ..Default::default()
            }
            .encode_to_vec()
        };
        let report = state::Report {
            counters: vec![vm("p"), vm("q"), vec![0xff; 9], vm("p")],
        };
        let Admission {
            message: Some(AdmittedMessage::Report(counters)),
            refused: 2,
        } = admit(proxy_message::Message::Report(report))
        else {
            panic!()
        };
        assert_eq!(counters.len(), 2);
        let share = |pool: &str, row, placements| {
            let pool = pool.to_owned();
            let row = vec![0; row];
            let placements = vec![0; placements];
            admit(proxy_message::Message::LoadReport(state::LoadReport {
                pool,
                row,
                placements,
                ..state::LoadReport::default()
            }))
            .message
            .is_some()
        };
        assert!(share("p", ROW_BYTES_MAX, SHARE_PLACEMENTS_BYTES_MAX));
        assert!(
            !share("q", 0, 0)
                && !share("p", ROW_BYTES_MAX + 1, 0)
                && !share("p", 0, SHARE_PLACEMENTS_BYTES_MAX + 1)
        );
        let message = |pool: &str, rows| {
            let pool = pool.to_owned();
            let rows = vec![0; rows];
            admit(proxy_message::Message::Observations(state::Observations {
                pool,
                rows,
                ..Default::default()
            }))
            .message
            .is_some()
        };
        let most = OBSERVATIONS_MAX * OBSERVATION_BYTES;
        assert!(message("p", most) && !message("q", 0) && !message("p", most + 1));
        let models = |pool: &str| state::LearnedModels {
            pool: pool.to_owned(),
            ..Default::default()
        };
        let claimed = |pool: &str| {
            admit(proxy_message::Message::LearnedModels(models(pool)))
                .message
                .is_some()
        };
        assert!(claimed("p") && !claimed("q"));
    }

    #[test]
    fn a_reason_is_cut_at_a_character() {
        let ack = state::Ack {
            pool: "p".to_owned(),
            refused: "ä".repeat(REASON_BYTES_MAX),
            ..Default::default()
        };
        let Some(AdmittedMessage::Ack(ack)) = admit(proxy_message::Message::Ack(ack)).message
        else {
            panic!()
        };
        assert_eq!(ack.refused.len(), REASON_BYTES_MAX);
    }
}
