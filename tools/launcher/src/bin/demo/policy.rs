//! One policy of the comparison: its Envoy, its model servers, and the results of its clients.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use testbed::Result;
use testbed::model_server::ModelServer;
use testbed::replay::{self, ReplayPlan, ReplayProgress, quantile};
use testbed::trace::Arrival;

use crate::MODEL;

/// A policy with separate servers, so that one policy does not warm the caches of the other.
pub(crate) struct DemoPolicy {
    name: &'static str,
    target: SocketAddr,
    progress: ReplayProgress,
    _servers: Vec<ModelServer>,
}

/// The figures of a policy so far. Times and tokens are those of answered requests only.
#[derive(Clone, Debug, Default)]
pub(crate) struct PolicyFigures {
    /// The number of requests that the clients have sent.
    pub(crate) sent: usize,
    /// The number of requests that have ended.
    pub(crate) done: usize,
    /// The number of requests that ended without a complete answer.
    pub(crate) failed: usize,
    /// Share of prompt tokens that the engines had cached, 0 to 1.
    pub(crate) hit_rate: f64,
    /// Median time to the first token.
    pub(crate) ttft_p50: Duration,
    /// 95th percentile of the time to the first token.
    pub(crate) ttft_p95: Duration,
    /// Mean time to the first token.
    pub(crate) ttft_mean: Duration,
    /// Median time to the end of the reply.
    pub(crate) reply_p50: Duration,
    /// The longest delay of a request behind its arrival time.
    pub(crate) late_max: Duration,
}

// === impl DemoPolicy ===

impl DemoPolicy {
    pub(crate) fn new(name: &'static str, target: SocketAddr, servers: Vec<ModelServer>) -> Self {
        Self {
            name,
            target,
            progress: ReplayProgress::default(),
            _servers: servers,
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn target(&self) -> SocketAddr {
        self.target
    }

    /// Sends all requests, with times counted from `start`. Returns when all requests have ended.
    pub(crate) async fn replay(
        &self,
        arrivals: &[Arrival],
        rate: f64,
        start: Instant,
    ) -> Result<()> {
        let plan = ReplayPlan {
            target: self.target,
            model: MODEL.into(),
            headers: Vec::new(),
            rate,
        };
        replay::run_observed(&plan, arrivals, start, &self.progress).await
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "token counts stay far below 2^52"
    )]
    pub(crate) fn figures(&self) -> PolicyFigures {
        let sent = self.progress.sent();
        let results = self.progress.results();
        let answered: Vec<_> = results
            .iter()
            .filter(|result| result.status == 200 && result.ttft.is_some())
            .collect();
        let mut ttfts: Vec<Duration> = answered.iter().filter_map(|result| result.ttft).collect();
        let mut replies: Vec<Duration> = answered.iter().map(|result| result.duration).collect();
        ttfts.sort();
        replies.sort();
        let [cached, prompt] = answered.iter().fold([0, 0], |[cached, prompt], r| {
            [cached + r.cached_tokens, prompt + r.prompt_tokens]
        });
        let count = u32::try_from(ttfts.len()).unwrap_or(u32::MAX).max(1);
        PolicyFigures {
            sent,
            done: results.len(),
            failed: results.len() - answered.len(),
            hit_rate: cached as f64 / prompt.max(1) as f64,
            ttft_p50: quantile(&ttfts, 0.5).unwrap_or_default(),
            ttft_p95: quantile(&ttfts, 0.95).unwrap_or_default(),
            ttft_mean: ttfts.iter().sum::<Duration>() / count,
            reply_p50: quantile(&replies, 0.5).unwrap_or_default(),
            late_max: results
                .iter()
                .map(|result| result.late)
                .max()
                .unwrap_or_default(),
        }
    }
}
