//! `no-hit-lru-scorer`: spreads requests whose prefix is cached nowhere, so that caches grow
//! evenly. The longer ago an endpoint got a request whose prefix was cached nowhere, the better is
//! its score.
//!
//! The plugin holds no state, because the proxy records picks of uncached requests
//! ([`crate::LocalState::last_cold_picks`]). Endpoints without a recorded pick all get the best
//! score, so the choice among these endpoints is random. llm-d scores these endpoints by their
//! position.

use crate::endpoint::EndpointIndex;
use crate::plugin::{
    Context, InvalidParameter, Parameter, Parameters, RequiredState, Scorer, readable,
};
use crate::plugin_type::{Plugin, PluginKind, PluginType};
use crate::scorer::{PREFIX_PRODUCER, UNKNOWN, share_before};
use crate::sort::sort_by;

pub(crate) const PLUGIN: PluginType = PluginType {
    name: "no-hit-lru-scorer",
    kind: PluginKind::Scorer,
    doc: readable(
        "0.5 for all if any candidate has a block of the prompt cached; else 1 - r / (n - 1), r = \
        how many of the n candidates received their last uncached request earlier than this one.",
    ),
    source: readable("llm-d-router, scorer/nohitlru"),
    parameters: &[
        Parameter::number(
            "lruSize",
            1024.0,
            "endpoints to remember; older ones count as never used; integer from 1",
        ),
        PREFIX_PRODUCER,
    ],
    needs: &[RequiredState::PrefixIndex, RequiredState::ColdPicks],
    build,
};

#[derive(Debug)]
struct NoHitLruScorer {
    remembered: usize,
}

fn build(parameters: &Parameters<'_>) -> Result<Plugin, InvalidParameter> {
    let remembered =
        usize::try_from(parameters.integer("lruSize", 1..=u32::MAX)?).unwrap_or(usize::MAX);
    Ok(Plugin::Scorer(Box::new(NoHitLruScorer { remembered })))
}

impl NoHitLruScorer {
    /// Writes a score for each endpoint from the number of its last pick for an uncached request.
    /// The numbers grow with every pick, and 0 means never.
    fn rate(&self, picks: &[u64], scores: &mut [f32]) {
        let mut sorted = picks.to_vec();
        sort_by(&mut sorted, |a, b| a < b);
        let oldest = sorted
            .len()
            .checked_sub(self.remembered)
            .and_then(|at| sorted.get(at))
            .copied()
            .unwrap_or(0);
        for (score, &pick) in scores.iter_mut().zip(picks) {
            *score = 1.0 - share_before(&sorted, if pick < oldest { 0 } else { pick });
        }
    }
}

impl Scorer for NoHitLruScorer {
    fn score(&self, context: &Context<'_>, endpoints: &[EndpointIndex], scores: &mut [f32]) {
        if endpoints
            .iter()
            .any(|&endpoint| context.affinity_blocks(endpoint) > 0)
        {
            return scores.fill(UNKNOWN);
        }
        let picks: Vec<u64> = endpoints
            .iter()
            .map(|&endpoint| context.local.last_cold_pick(endpoint))
            .collect();
        self.rate(&picks, scores);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(remembered: usize, picks: &[u64]) -> Vec<f32> {
        let mut scores = vec![0.0; picks.len()];
        NoHitLruScorer { remembered }.rate(picks, &mut scores);
        scores
    }

    #[test]
    fn the_longest_ago_is_the_best() {
        assert_eq!(rate(1024, &[30, 10, 20]), [0.0, 1.0, 0.5]);
        assert_eq!(
            rate(1024, &[0, 7, 0, 9, 8]),
            [1.0, 0.5, 1.0, 0.0, 0.25],
            "never comes before ever, and all nevers are equal"
        );
        assert_eq!(rate(1024, &[0, 0]), [1.0, 1.0]);
    }

    #[test]
    fn one_candidate_and_none() {
        assert_eq!(rate(1024, &[9]), [1.0]);
        assert_eq!(rate(1024, &[]), [0.0; 0]);
    }

    #[test]
    fn a_forgotten_endpoint_counts_as_never_used() {
        assert_eq!(rate(2, &[30, 10, 20]), [0.0, 1.0, 0.5]);
        assert_eq!(rate(2, &[1, 2, 3, 4, 5]), [1.0, 1.0, 1.0, 0.25, 0.0]);
        assert_eq!(rate(1, &[1, 2]), [1.0, 0.0]);
    }
}
