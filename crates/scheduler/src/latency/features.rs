//! Converts the conditions of a pick to the features that are the inputs of a model.
//!
//! Features are plain counts and times, without logarithms. Latency is nearly linear in them,
//! because each unit of queued work takes the same time, and the trees that correct the rest only
//! compare numbers. So the only costly operation at a pick is one `exp` for TTFT and one `exp` for
//! TPOT.

use super::conditions::Conditions;
use super::step::StepModel;
use crate::text::readable;

pub const FEATURES_COUNT: usize = FEATURES.len();

/// The features of one endpoint and one request, in the order of [`FEATURES`].
pub type Features = [f32; FEATURES_COUNT];

/// The definition of one input of a model.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    pub name: &'static str,
    /// The meaning of the feature, as the documentation prints it.
    pub doc: &'static str,
    /// The value of the feature up to which a model predicts, even if the model has observed no
    /// value up to this one yet.
    pub usual: f32,
}

pub const FEATURES: [Feature; 10] = [
    Feature {
        name: "own",
        doc: readable("prefill time of this prompt by the step model, ms"),
        usual: 500.0,
    },
    Feature {
        name: "step",
        doc: readable("a decode step with this request in the batch, by the step model, ms"),
        usual: 100.0,
    },
    Feature {
        name: "requests",
        doc: readable("requests in flight: the last scrape plus changes since"),
        usual: 16.0,
    },
    Feature {
        name: "queued",
        doc: readable("requests waiting in the engine, scraped"),
        usual: 8.0,
    },
    Feature {
        name: "running",
        doc: readable("requests running in the engine, scraped; else requests in flight"),
        usual: 16.0,
    },
    Feature {
        name: "kv",
        doc: readable("share of KV-cache blocks in use, scraped"),
        usual: 1.0,
    },
    Feature {
        name: "prompt",
        doc: readable("prompt tokens"),
        usual: 8_192.0,
    },
    Feature {
        name: "uncached",
        doc: readable("prompt tokens not cached at the endpoint"),
        usual: 8_192.0,
    },
    Feature {
        name: "prefill",
        doc: readable("uncached prompt tokens that wait for prefill at the endpoint"),
        usual: 16_384.0,
    },
    Feature {
        name: "context",
        doc: readable("context tokens of the requests that decode there"),
        usual: 65_536.0,
    },
];

/// The number of terms in the weighted sum for TTFT, and in the weighted sum for TPOT.
pub const TERMS: usize = 8;

/// Returns the features under these conditions. Unknown values count as 0. If the number of running
/// requests is unknown, the ledger's number is used.
#[must_use]
pub fn features(conditions: &Conditions, step: &StepModel) -> Features {
    let c = conditions;
    let running = c.running.unwrap_or(c.requests);
    [
        step.prefill_ms(c.uncached_tokens, c.prompt_tokens),
        step.decode_ms(c.requests + 1.0, c.context_tokens + c.prompt_tokens),
        c.requests,
        c.queued.unwrap_or(0.0),
        running,
        c.kv_utilization.unwrap_or(0.0),
        c.prompt_tokens,
        c.uncached_tokens,
        c.prefill_tokens,
        c.context_tokens,
    ]
}

/// Returns the terms whose weighted sum is the TTFT. The weights of these terms are not negative.
pub fn ttft_terms(x: &Features) -> [f32; TERMS] {
    let &[
        own,
        step,
        requests,
        queued,
        _running,
        kv,
        _prompt,
        uncached,
        prefill,
        _context,
    ] = x;
    [
        1.0,
        own,
        step,
        requests,
        queued,
        uncached,
        prefill,
        prefill * kv,
    ]
}

/// Returns the terms whose weighted sum is the TPOT. An engine mixes at most one chunk of prefill
/// into a step, so the terms of a queue saturate.
pub fn tpot_terms(x: &Features) -> [f32; TERMS] {
    let &[
        _own,
        step,
        requests,
        queued,
        _running,
        kv,
        _prompt,
        uncached,
        prefill,
        _context,
    ] = x;
    let waiting = uncached + prefill;
    [
        1.0,
        step,
        requests.min(32.0),
        kv,
        queued / (queued + 8.0),
        waiting / (waiting + 2_048.0),
        prefill / (prefill + 16_384.0),
        requests,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_this_very_table() {
        let rows: String = FEATURES
            .iter()
            .map(|feature| format!("| {} | {} |\n", feature.name, feature.doc))
            .collect();
        let page = include_str!("../../../../docs/explanation/latency-prediction.md");
        assert!(
            page.contains(&format!("| feature | what it is |\n|---|---|\n{rows}\n")),
            "docs/explanation/latency-prediction.md should have:\n{rows}"
        );
    }

    #[test]
    fn the_times_are_sums_of_these_terms() {
        let step = StepModel::from_parts([1.0, 2.0, 0.0], [3.0, 5.0, 7.0], 100.0);
        let conditions = Conditions {
            queued: Some(24.0),
            running: Some(9.0),
            requests: 40.0,
            prefill_tokens: 49_152.0,
            context_tokens: 11.0,
            kv_utilization: Some(0.5),
            prompt_tokens: 13_000.0,
            uncached_tokens: 12_288.0,
        };
        let x = features(&conditions, &step);
        let own = step.prefill_ms(12_288.0, 13_000.0);
        let decode = step.decode_ms(41.0, 13_011.0);
        assert_eq!(
            x,
            [
                own, decode, 40.0, 24.0, 9.0, 0.5, 13_000.0, 12_288.0, 49_152.0, 11.0
            ]
        );
        assert_eq!(
            ttft_terms(&x),
            [1.0, own, decode, 40.0, 24.0, 12_288.0, 49_152.0, 24_576.0]
        );
        assert_eq!(
            tpot_terms(&x),
            [
                1.0,
                decode,
                32.0,
                0.5,
                0.75,
                61_440.0 / 63_488.0,
                0.75,
                40.0
            ]
        );
    }

    #[test]
    fn unknown_features_are_0_but_running_requests_come_from_the_ledger() {
        let conditions = Conditions {
            requests: 7.0,
            prompt_tokens: 100.0,
            uncached_tokens: 100.0,
            ..Conditions::default()
        };
        let x = features(&conditions, &StepModel::default());
        let of = |name: &str| {
            x[FEATURES
                .iter()
                .position(|feature| feature.name == name)
                .unwrap()]
        };
        assert_eq!(
            (of("queued"), of("kv"), of("running"), of("requests")),
            (0.0, 0.0, 7.0, 7.0)
        );
        assert!((of("own") - 15.01).abs() < 1e-3 && of("step") > 11.0);
    }
}
