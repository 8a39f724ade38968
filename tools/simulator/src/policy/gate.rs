//! The queues in which other routers hold requests before they pick.

use std::collections::VecDeque;

use crate::workload::RequestClass;

/// The rule by which another router (llm-d's or Dynamo's) sends the requests that it holds. Both
/// routers check the pool as a whole, and always send the first request of the highest priority
/// next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum GateRule {
    /// llm-d's rule: the router sends at most one request for each arrival and each millisecond,
    /// while the detector of the pipeline says that the pool is not saturated.
    Paced(GateFairness),
    /// Dynamo's rule: when a prefill or a request has ended, the router sends requests until each
    /// engine has more than this number of prompt tokens to compute.
    PrefillTokens(f64),
}

/// The rule that selects the flow of a priority from which the router takes the next request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GateFairness {
    /// The flow whose first request arrived first: llm-d's `global-strict-fairness-policy`.
    Strict,
    /// Each flow in turn: llm-d's `round-robin-fairness-policy`.
    RoundRobin,
}

/// The requests that a router holds.
#[derive(Debug)]
pub(crate) struct RequestGate {
    rule: GateRule,
    flows: Vec<GateFlow>,
    /// Whether the router may send the next request if the pool has room.
    due: bool,
    /// Whether the caller has planned the next call of [`Self::tick`].
    ticks: bool,
    turns: u64,
}

/// The requests of a flow, in order of arrival, by number.
#[derive(Debug)]
struct GateFlow {
    class: RequestClass,
    held: VecDeque<u32>,
    /// The number of the turn in which this flow's last request was sent.
    turn: u64,
}

// === impl RequestGate ===

impl RequestGate {
    pub(crate) fn new(rule: GateRule) -> Self {
        Self {
            rule,
            flows: Vec::new(),
            due: false,
            ticks: false,
            turns: 0,
        }
    }

    pub(crate) fn hold(&mut self, request: u32, class: RequestClass) {
        // Dynamo sends a new request immediately only if no request waits.
        self.due |= matches!(self.rule, GateRule::Paced(_)) || !self.holds();
        let is_flow = |flow: &GateFlow| {
            flow.class.priority == class.priority && flow.class.flow == class.flow
        };
        match self.flows.iter_mut().find(|flow| is_flow(flow)) {
            Some(flow) => flow.held.push_back(request),
            None => self.flows.push(GateFlow {
                class,
                held: VecDeque::from([request]),
                turn: 0,
            }),
        }
    }

    /// Whether the caller must call [`Self::tick`] after one millisecond and has not planned this
    /// yet.
    pub(crate) fn begins_to_tick(&mut self) -> bool {
        let begins = !self.ticks && matches!(self.rule, GateRule::Paced(_)) && self.holds();
        self.ticks |= begins;
        begins
    }

    /// Records that a millisecond has passed.
    pub(crate) fn tick(&mut self) {
        self.ticks = false;
        self.due |= matches!(self.rule, GateRule::Paced(_));
    }

    /// Records that a prefill or a request has ended.
    pub(crate) fn room_changed(&mut self) {
        self.due |= matches!(self.rule, GateRule::PrefillTokens(_));
    }

    pub(crate) fn next(&mut self, is_full: impl FnOnce(GateRule) -> bool) -> Option<u32> {
        if !self.due {
            return None;
        }
        let next = if self.holds() && !is_full(self.rule) {
            self.take()
        } else {
            None
        };
        self.due = next.is_some() && matches!(self.rule, GateRule::PrefillTokens(_));
        next
    }

    fn holds(&self) -> bool {
        self.flows.iter().any(|flow| !flow.held.is_empty())
    }

    fn take(&mut self) -> Option<u32> {
        let in_turn = self.rule == GateRule::Paced(GateFairness::RoundRobin);
        let waiting = self
            .flows
            .iter_mut()
            .filter_map(|flow| flow.held.front().copied().map(|first| (flow, first)));
        let order = |(flow, first): &(&mut GateFlow, u32)| {
            (
                -flow.class.priority,
                if in_turn { flow.turn } else { 0 },
                *first,
            )
        };
        let (flow, _) = waiting.min_by_key(order)?;
        self.turns += 1;
        flow.turn = self.turns;
        flow.held.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOW: RequestClass = RequestClass {
        name: "low",
        priority: 0,
        flow: "a",
        prompt_error: 0.0,
    };
    const OTHER: RequestClass = RequestClass { flow: "b", ..LOW };
    const HIGH: RequestClass = RequestClass {
        priority: 10,
        ..LOW
    };

    /// Returns a gate that holds six requests: 0, 1 and 2 of one flow, 3 and 4 of another flow, and
    /// 5 of a higher priority.
    fn filled(rule: GateRule) -> RequestGate {
        let mut gate = RequestGate::new(rule);
        (0..3).for_each(|request| gate.hold(request, LOW));
        (3..5).for_each(|request| gate.hold(request, OTHER));
        gate.hold(5, HIGH);
        gate
    }

    #[test]
    fn llm_d_sends_one_request_for_each_millisecond() {
        let mut gate = filled(GateRule::Paced(GateFairness::Strict));
        assert_eq!(
            (gate.next(|_| false), gate.next(|_| false)),
            (Some(5), None),
            "one for the arrivals, the highest priority first"
        );
        gate.room_changed();
        assert_eq!(
            gate.next(|_| false),
            None,
            "it does not wait for events of engines"
        );
        gate.tick();
        assert_eq!(
            (gate.next(|_| true), gate.next(|_| false)),
            (None, None),
            "the turn of a saturated pool is lost"
        );
        let order: Vec<u32> = std::iter::repeat_with(|| (gate.tick(), gate.next(|_| false)).1)
            .map_while(|next| next)
            .collect();
        assert_eq!((order, gate.begins_to_tick()), (vec![0, 1, 2, 3, 4], false));
        gate.hold(6, LOW);
        assert_eq!(
            (gate.begins_to_tick(), gate.begins_to_tick()),
            (true, false),
            "one tick at a time"
        );
    }

    #[test]
    fn flows_take_turns_where_llm_d_is_told_so() {
        let mut gate = filled(GateRule::Paced(GateFairness::RoundRobin));
        let order: Vec<u32> = std::iter::repeat_with(|| (gate.tick(), gate.next(|_| false)).1)
            .map_while(|next| next)
            .collect();
        assert_eq!(order, [5, 0, 3, 1, 4, 2]);
    }

    #[test]
    fn dynamo_sends_until_every_engine_is_busy_and_lets_nobody_pass() {
        let mut gate = filled(GateRule::PrefillTokens(100.0));
        let mut room = 2;
        let mut sent = |gate: &mut RequestGate, more: u32| {
            room += more;
            let mut next = |gate: &mut RequestGate| {
                let next = gate.next(|rule| rule == GateRule::PrefillTokens(100.0) && room == 0)?;
                room -= 1;
                Some(next)
            };
            std::iter::repeat_with(|| next(gate))
                .map_while(|next| next)
                .collect::<Vec<u32>>()
        };
        assert_eq!(sent(&mut gate, 0), [5, 0]);
        gate.hold(6, HIGH);
        gate.tick();
        assert_eq!(
            sent(&mut gate, 1),
            [0; 0],
            "a request that arrives waits behind the others for an event"
        );
        gate.room_changed();
        assert_eq!(
            (sent(&mut gate, 0), gate.begins_to_tick()),
            (vec![6], false)
        );
    }
}
