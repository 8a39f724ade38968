//! The result of a pick.

use crate::endpoint::EndpointIndex;
use crate::latency::NoPrediction;
use crate::predictions::EndpointPrediction;
use crate::slo::Slo;

/// The maximum number of endpoints in a ranked list. Each endpoint allows one more attempt of the
/// same request, and after a few failures the pool has a problem that retries do not solve.
pub const RANKED_MAX: usize = 8;

/// The endpoints to try, best first. The list has at least one and at most [`RANKED_MAX`]
/// endpoints, and no endpoint occurs twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankedList {
    first: EndpointIndex,
    rest: Vec<EndpointIndex>,
}

/// The outcome of scheduling one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The request is sent to an endpoint.
    Route(Route),
    /// The request is refused for now (429): the pool could serve the request, but a policy forbids
    /// that.
    Shed(ShedReason),
    /// No endpoint can serve the request (503).
    Unavailable(UnavailableReason),
    /// A header of the request names a profile that does not exist (400).
    UnknownProfile(Box<str>),
}

/// The endpoints to which a request is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub ranked: RankedList,
    /// The endpoint that computes the prompt before another endpoint decodes, if the work is
    /// divided.
    pub prefill: Option<EndpointIndex>,
    /// The endpoints that encode images, videos and audio before the prefill. The list is empty if
    /// the prefill endpoint also encodes.
    pub encode: Vec<EndpointIndex>,
    /// The data-parallel rank that serves the request, if `ranked` has only the endpoint in front
    /// of this rank.
    pub data_parallel: Option<EndpointIndex>,
}

/// The reason why a request was shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShedReason {
    /// The pool is saturated and the request's priority is below zero.
    Saturated,
    /// An admitter plugin of the pipeline refused the request.
    Admitter,
    /// No endpoint would meet the SLOs, and the request may be shed.
    Slo,
}

/// The reason why no endpoint can serve the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnavailableReason {
    /// No endpoint of the pool is ready.
    NoReadyEndpoint,
    /// Endpoints are ready, but the subset hint allows none of them.
    SubsetEmpty,
    /// Endpoints are ready and allowed, but the metadata of each names only other models.
    ModelNotServed,
    /// Endpoints were ready and allowed, but the filters of the profile dropped all of them.
    Filtered,
}

/// An endpoint that was dropped, and the plugin that dropped it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedEndpoint {
    pub endpoint: EndpointIndex,
    /// The name of the plugin that dropped the endpoint.
    pub by: Box<str>,
}

/// The reasons for a decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// The estimated number of tokens in the prompt.
    pub prompt_tokens: u32,
    /// The estimated number of uncached prompt tokens at each endpoint, in the snapshot's order.
    pub uncached_tokens: Vec<u32>,
    /// The SLOs that the request demands.
    pub asks: Slo,
    /// The predicted latency at each endpoint, or the reason why there is no prediction, in the
    /// snapshot's order. The list is empty if the pipeline does not predict latency.
    pub predictions: Vec<Result<EndpointPrediction, NoPrediction>>,
    /// The endpoints that were dropped before the first profile ran, in the order in which they
    /// were dropped.
    pub dropped: Vec<DroppedEndpoint>,
    /// The profiles that ran, in the order in which they ran.
    pub profiles: Vec<ProfileExplanation>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileExplanation {
    pub name: Box<str>,
    /// The endpoints that the profile dropped, in the order in which it dropped them.
    pub dropped: Vec<DroppedEndpoint>,
    pub scores: Vec<ScoreColumn>,
    /// The weighted sum of the scores of each endpoint that no filter dropped.
    pub totals: Vec<(EndpointIndex, f32)>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ScoreColumn {
    /// The name of the scorer in the profile.
    pub scorer: Box<str>,
    pub weight: f32,
    /// The unweighted score of each endpoint, 0 to 1.
    pub scores: Vec<(EndpointIndex, f32)>,
    /// The terms that make up each endpoint's score. The list is empty for a scorer whose score has
    /// no terms.
    pub cost_terms: Vec<CostTerms>,
}

/// An endpoint and the terms of its cost. Each term has a name, which ends with the unit, and a
/// value.
pub type CostTerms = (EndpointIndex, Vec<(&'static str, f32)>);

// === impl Route ===

impl Route {
    /// Returns a route in which one endpoint does all the work: the first endpoint of the list that
    /// answers.
    #[must_use]
    pub fn to(ranked: RankedList) -> Self {
        Self {
            ranked,
            prefill: None,
            encode: Vec::new(),
            data_parallel: None,
        }
    }

    /// Returns all endpoints that the route names, those of the ranked list first.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointIndex> + '_ {
        self.ranked
            .iter()
            .chain(self.prefill)
            .chain(self.encode.iter().copied())
            .chain(self.data_parallel)
    }
}

// === impl RankedList ===

impl RankedList {
    /// Makes a list of the first [`RANKED_MAX`] different endpoints in `order`. Returns `None` if
    /// `order` is empty.
    pub fn new(order: impl IntoIterator<Item = EndpointIndex>) -> Option<Self> {
        let mut order = order.into_iter();
        let first = order.next()?;
        let mut rest: Vec<EndpointIndex> = Vec::new();
        for next in order {
            if rest.len() + 1 >= RANKED_MAX {
                break;
            }
            if next != first && !rest.contains(&next) {
                rest.push(next);
            }
        }
        Some(Self { first, rest })
    }

    #[must_use]
    pub fn one(endpoint: EndpointIndex) -> Self {
        Self {
            first: endpoint,
            rest: Vec::new(),
        }
    }

    /// Returns the best endpoint, which is tried first.
    pub fn first(&self) -> EndpointIndex {
        self.first
    }

    /// Returns all endpoints of the list, best first.
    pub fn iter(&self) -> impl Iterator<Item = EndpointIndex> + '_ {
        std::iter::once(self.first).chain(self.rest.iter().copied())
    }

    /// Returns the number of endpoints, which is never 0.
    #[expect(clippy::len_without_is_empty, reason = "never empty by construction")]
    pub fn len(&self) -> usize {
        1 + self.rest.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(order: &[u16]) -> Option<(usize, Vec<u16>)> {
        let ranked = RankedList::new(order.iter().copied().map(EndpointIndex))?;
        assert_eq!(Some(ranked.first()), ranked.iter().next());
        Some((ranked.len(), ranked.iter().map(|index| index.0).collect()))
    }

    #[test]
    fn a_list_names_each_once_and_ends_at_its_limit() {
        assert_eq!(listed(&[]), None);
        assert_eq!(listed(&[7]), Some((1, vec![7])));
        assert_eq!(listed(&[3, 1, 3, 1, 2, 2]), Some((3, vec![3, 1, 2])));
        assert_eq!(
            listed(&[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
            Some((8, vec![9, 8, 7, 6, 5, 4, 3, 2]))
        );
    }
}
