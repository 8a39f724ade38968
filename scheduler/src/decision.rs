//! What comes out of a pick.

use crate::endpoint::EndpointIndex;
use crate::latency::Abstention;
use crate::predictions::EndpointPrediction;
use crate::slo::Slo;

/// The most endpoints a ranked list may hold. Each stands for one more attempt of the same request: beyond a few the pool has other troubles.
pub const RANKED_MAX: usize = 8;

/// Endpoints to try, best first; at least one, at most [`RANKED_MAX`], none twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranked {
    first: EndpointIndex,
    rest: Vec<EndpointIndex>,
}

/// The outcome of scheduling one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Send it.
    Route(Route),
    /// Refuse it for now (429): the pool could serve it, policy says not to.
    Shed(Shed),
    /// Nobody can serve it (503).
    Unavailable(Unavailable),
    /// It asks, by header, for a profile of this name, which there is not (400).
    UnknownProfile(Box<str>),
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// To the first of these that answers.
    pub ranked: Ranked,
    /// Who works through its prompt first, when not the same that decodes.
    pub prefill: Option<EndpointIndex>,
    /// Who encodes its images, videos and audio clips first; empty when whoever works through the prompt does.
    pub encode: Vec<EndpointIndex>,
    /// The data-parallel rank that serves it behind the (only) endpoint of the list.
    pub data_parallel: Option<EndpointIndex>,
}

/// Why a request was shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shed {
    /// The pool is saturated and the request's priority is below zero.
    Saturated,
    /// An admitter of the pipeline refused it.
    Admitter,
    /// No endpoint would serve it within the SLOs, and it yields.
    Slo,
}

/// Why nobody can serve a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// No endpoint of the pool is ready.
    NoReadyEndpoint,
    /// Endpoints are ready, but the subset hint allows none of them.
    SubsetEmpty,
    /// Endpoints are ready and allowed, but each says it serves other models.
    ModelNotServed,
    /// Endpoints were ready and allowed, but a filter of the profile dropped the last of them.
    Filtered,
}

/// Why and by whom an endpoint was dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drop {
    /// The endpoint.
    pub endpoint: EndpointIndex,
    /// Name of the plugin that dropped it.
    pub by: Box<str>,
}

/// A decision's reasons, filled in when asked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Explanation {
    /// Estimated tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that each endpoint would have to work through, as it is believed to hold the others; parallel to the snapshot's
    /// endpoints.
    pub uncached_tokens: Vec<u32>,
    /// What it asks of latency.
    pub asks: Slo,
    /// What it would see at each endpoint, or why that is not known, parallel to the snapshot's endpoints; empty where nobody asked.
    pub predictions: Vec<Result<EndpointPrediction, Abstention>>,
    /// Everyone who was dropped before any profile ran, in the order it happened.
    pub dropped: Vec<Drop>,
    /// The profiles that ran, in order.
    pub profiles: Vec<ProfileExplanation>,
}

/// What one profile made of those that were left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProfileExplanation {
    /// Its name.
    pub name: Box<str>,
    /// Everyone it dropped, in the order it happened.
    pub dropped: Vec<Drop>,
    /// One column for each scorer: its name, its weight, and the unweighted score of each endpoint it saw.
    pub scores: Vec<ScoreColumn>,
    /// Weighted total of each endpoint that reached the picker.
    pub totals: Vec<(EndpointIndex, f32)>,
}

/// What one scorer said.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreColumn {
    /// Name of the scorer in the profile.
    pub scorer: Box<str>,
    /// Its weight.
    pub weight: f32,
    /// Unweighted score by endpoint, 0 to 1.
    pub scores: Vec<(EndpointIndex, f32)>,
    /// The terms of the scores, by endpoint; empty for a scorer without terms.
    pub cost_terms: Vec<CostTerms>,
}

/// An endpoint and the terms of its cost: name with unit, value.
pub type CostTerms = (EndpointIndex, Vec<(&'static str, f32)>);

// === impl Route ===

impl Route {
    /// To the first of these that answers, which does all of it.
    #[must_use]
    pub fn to(ranked: Ranked) -> Self {
        Self { ranked, prefill: None, encode: Vec::new(), data_parallel: None }
    }

    /// Everyone it names, the list first.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointIndex> + '_ {
        self.ranked.iter().chain(self.prefill).chain(self.encode.iter().copied()).chain(self.data_parallel)
    }
}

// === impl Ranked ===

impl Ranked {
    /// A list of at least one; duplicates and what is beyond [`RANKED_MAX`] are left out. `None` when there is nobody.
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

    /// A list of one.
    #[must_use]
    pub fn one(endpoint: EndpointIndex) -> Self {
        Self { first: endpoint, rest: Vec::new() }
    }

    /// The endpoint picked.
    #[must_use]
    pub fn first(&self) -> EndpointIndex {
        self.first
    }

    /// All of them, best first.
    pub fn iter(&self) -> impl Iterator<Item = EndpointIndex> + '_ {
        std::iter::once(self.first).chain(self.rest.iter().copied())
    }

    /// How many; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "never empty by construction")]
    pub fn len(&self) -> usize {
        1 + self.rest.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(order: &[u16]) -> Option<(usize, Vec<u16>)> {
        let ranked = Ranked::new(order.iter().copied().map(EndpointIndex))?;
        assert_eq!(Some(ranked.first()), ranked.iter().next());
        Some((ranked.len(), ranked.iter().map(|index| index.0).collect()))
    }

    #[test]
    fn a_list_names_each_once_and_ends_at_its_limit() {
        assert_eq!(listed(&[]), None);
        assert_eq!(listed(&[7]), Some((1, vec![7])));
        assert_eq!(listed(&[3, 1, 3, 1, 2, 2]), Some((3, vec![3, 1, 2])));
        assert_eq!(listed(&[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]), Some((8, vec![9, 8, 7, 6, 5, 4, 3, 2])));
    }
}
