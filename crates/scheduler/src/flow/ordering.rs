//! Ordering policies choose which request of a flow (the requests of one fairness id) is sent next.

use super::settings::ORDERING_DEFAULT;
use super::{OrderingPolicy, QueuedFacts};
use crate::plugin::readable;
use crate::plugin_type::{Plugin, PluginKind, PluginType};

pub(crate) const FCFS: PluginType = PluginType {
    name: ORDERING_DEFAULT,
    kind: PluginKind::Ordering,
    doc: readable("First come, first served. The default."),
    source: readable("llm-d-router, flowcontrol/ordering"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Ordering(Box::new(ByArrival))),
};

pub(crate) const EDF: PluginType = PluginType {
    name: "edf-ordering-policy",
    kind: PluginKind::Ordering,
    doc: readable("The earliest deadline (arrival + TTL) first."),
    source: readable("llm-d-router, flowcontrol/ordering"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Ordering(Box::new(ByDeadline))),
};

pub(crate) const SLO_DEADLINE: PluginType = PluginType {
    name: "slo-deadline-ordering-policy",
    kind: PluginKind::Ordering,
    doc: readable("The earliest arrival + TTFT SLO first; requests without the SLO last."),
    source: readable("llm-d-router, flowcontrol/ordering"),
    parameters: &[],
    needs: &[],
    build: |_| Ok(Plugin::Ordering(Box::new(BySloDeadline))),
};

#[derive(Debug)]
struct ByArrival;

#[derive(Debug)]
struct ByDeadline;

#[derive(Debug)]
struct BySloDeadline;

impl OrderingPolicy for ByArrival {
    fn key(&self, request: &QueuedFacts) -> u64 {
        request.arrived.0
    }
}

impl OrderingPolicy for ByDeadline {
    fn key(&self, request: &QueuedFacts) -> u64 {
        request.expires.0
    }
}

impl OrderingPolicy for BySloDeadline {
    fn key(&self, request: &QueuedFacts) -> u64 {
        let slo_ns = |us: u32| u64::from(us).saturating_mul(1_000);
        request
            .ttft_slo_us
            .map_or(u64::MAX, |us| request.arrived.0.saturating_add(slo_ns(us)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Timestamp;

    #[test]
    fn each_policy_orders_by_its_own_moment() {
        let at = |ms| Timestamp::default().plus_ms(ms);
        let requests = [(1, 90, Some(80_000)), (2, 30, None), (3, 60, Some(10_000))];
        let order = |plugin: &PluginType| -> Vec<usize> {
            let Ok(Plugin::Ordering(policy)) = plugin.build(&[]) else {
                panic!("{}", plugin.name)
            };
            let key = |&i: &usize| {
                let (arrived, expires, ttft_slo_us) = requests[i];
                policy.key(&QueuedFacts {
                    arrived: at(arrived),
                    expires: at(expires),
                    ttft_slo_us,
                })
            };
            let mut order = vec![0, 1, 2];
            order.sort_by_key(key);
            order
        };
        assert_eq!(order(&FCFS), [0, 1, 2]);
        assert_eq!(order(&EDF), [1, 2, 0]);
        assert_eq!(order(&SLO_DEADLINE), [2, 0, 1]);
    }
}
