//! Flow control: which of the requests that wait goes next, and whether an endpoint has room for
//! it. Pure rules; the queues are in `pool-state`.
//!
//! A *band* holds the requests of one priority, a *flow* those of one fairness id within a band.

mod control;
pub use control::{BandRules, FLOW_CONTROL, FlowControl};
pub(crate) use control::{PLUGIN, Policies};

mod order;
pub use order::{
    BandService, FullEndpoint, OrderRow, OrderStep, QueuedInBand, QueuedTag, SharedOrder,
    TRIES_AT_ENDPOINT,
};

mod settings;
pub use settings::FlowSettings;

pub(crate) mod fairness;
pub(crate) mod ordering;
pub(crate) mod usage_limit;

use crate::endpoint::EndpointRef;
use crate::plugin::{PluginDebug, debug_by_show};
use crate::time::Timestamp;

/// The tokens of a request that its flow is charged for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlowCost {
    /// Prompt tokens that the picked endpoint has not cached, as estimated.
    pub prompt: f64,
    /// Output tokens: the expected ones until the request ends.
    pub output: f64,
}

/// The service of a flow so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlowAccount {
    /// The virtual time at which the next request of the flow starts, in tokens.
    pub start: f64,
    /// The number of the band's turn in which the flow was last served; 0 is never.
    pub turn: u64,
    /// Weighted tokens received, decayed until `attained_at`.
    pub attained: f64,
    /// The moment of `attained`.
    pub attained_at: Timestamp,
}

/// The service of a band so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BandAccount {
    /// The lowest start among the requests that waited when one was served last, in tokens.
    pub virtual_time: f64,
    /// The number of requests served.
    pub turn: u64,
}

/// A request that waits, as ordering policies see it.
#[derive(Clone, Copy, Debug)]
pub struct QueuedFacts {
    /// When the request arrived.
    pub arrived: Timestamp,
    /// When it is given up.
    pub expires: Timestamp,
    /// The TTFT SLO of the request, in µs, if it has one.
    pub ttft_slo_us: Option<u32>,
}

/// The room that a request waits for: a running request may be given up for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomAsk {
    /// Where it must be; `None` if room anywhere in the pool helps.
    pub endpoint: Option<EndpointRef>,
    /// The priority of the request that waits. Only work of a lower one is given up.
    pub priority: i32,
}

/// How full an endpoint or a pool may be for a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoomLimits {
    /// Whether the request is of the highest band in use. Lower bands leave a reserve.
    pub critical: bool,
    /// The saturation that the band may fill.
    pub ceiling: UsageCeiling,
    /// The share of all this that the proxy may fill, above 0 to 1.
    pub share: f64,
}

/// The saturation from which on a band is held; 1 is full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum UsageCeiling {
    /// The same at every load.
    Fixed(f64),
    /// Falls as the load rises: 1 - `share` x saturation. Above it, requests pass in one of
    /// saturation / (1 - saturation) turns. `turn` is the number of this one.
    Reflective {
        /// 0 for the highest band, 1 for the lowest, those between in equal steps.
        share: f64,
        /// How often a request of the band was tried before.
        turn: u64,
    },
}

/// The place of a band among the bands in use, the highest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandRank {
    /// The number of higher bands.
    pub higher: usize,
    /// The number of bands; at least 1.
    pub bands: usize,
    /// The priority of the band, and of the highest and the lowest band.
    pub priorities: (i32, i32, i32),
}

/// Chooses among the flows of a band.
pub trait FairnessPolicy: PluginDebug + Send + Sync {
    /// The rank of a flow whose first request has waited for `waited_ms`: the lowest goes first.
    /// Among equals, the ordering policy decides.
    fn rank(&self, flow: &FlowAccount, band: &BandAccount, waited_ms: f64, now: Timestamp) -> f64;

    /// Called when the first request of a flow arrives, while no other request of the flow waits.
    fn begin(&self, _flow: &mut FlowAccount, _band: &BandAccount) {}

    /// A request of the band goes to an endpoint now. `lowest` is the lowest rank among the flows
    /// that wait and its own, before it is charged.
    fn advance(&self, _band: &mut BandAccount, _lowest: f64) {}

    /// Charges the flow for a request that goes to an endpoint now.
    fn charge(
        &self,
        flow: &mut FlowAccount,
        band: &mut BandAccount,
        cost: FlowCost,
        now: Timestamp,
    );

    /// Corrects the charge of a request that has ended: its output differed by `output` tokens.
    fn settle(&self, flow: &mut FlowAccount, output: f64);

    /// The share of all tokens that a band gets in any case while it waits behind a higher one.
    fn minimum_share(&self) -> f64 {
        0.0
    }
}

/// Orders the requests of a flow.
pub trait OrderingPolicy: PluginDebug + Send + Sync {
    /// The key of a request: the lowest goes first; among equals, the one that arrived first.
    fn key(&self, request: &QueuedFacts) -> u64;
}

/// Says how much of the pool a band may fill.
pub trait UsageLimitPolicy: PluginDebug + Send + Sync {
    /// How much of the pool the band may fill. `turn` is how often a request of the band was tried
    /// before.
    fn ceiling(&self, band: BandRank, turn: u64) -> UsageCeiling;
}

debug_by_show!(FairnessPolicy, OrderingPolicy, UsageLimitPolicy);

// === impl FlowCost ===

impl FlowCost {
    #[must_use]
    pub fn tokens(self) -> f64 {
        self.prompt + self.output
    }
}

// === impl UsageCeiling ===

impl UsageCeiling {
    /// The ceiling while the load is `saturation`.
    pub fn at(self, saturation: impl FnOnce() -> f64) -> f64 {
        let (share, turn) = match self {
            Self::Fixed(ceiling) => return ceiling,
            Self::Reflective { share, turn } => (share, turn),
        };
        let saturation = saturation();
        if share <= 0.0 || saturation < 1.0 - share * saturation {
            return 1.0;
        }
        // Positive, and a greater period is as good as the greatest.
        let period = libm::round(saturation / (1.0 - saturation)).max(1.0) as u64;
        if saturation < 1.0 && turn.is_multiple_of(period) {
            1.0
        } else {
            0.0
        }
    }
}

// === impl RoomLimits ===

impl RoomLimits {
    /// The limits of a request that may fill everything.
    pub const ALL: Self = Self {
        critical: true,
        ceiling: UsageCeiling::Fixed(1.0),
        share: 1.0,
    };
}
