//! Configurations from other projects. Our daemon must accept each file that the other project's
//! picker loads.
//!
//! `tests/configs/others.jsonl` has one line for each file: its place (repository, commit, path),
//! and its settings. The settings were collected from public files of llm-d, KServe and the Gateway
//! API Inference Extension, under the Apache License 2.0. The settings were reduced to what a
//! reader looks at: no comments, no parameters of refused plugins, no addresses and no names of
//! models.
//!
//! The files are those with the word `EndpointPickerConfig` in the newest stored commit of each
//! repository, and in the last commit of some releases. The files of llm-d/llm-d are stored one by
//! one, so their commits differ. A text may be a file, a part of one, or a literal in a program. In
//! literals, `%s` and `%q` were replaced by what they stand for.
//!
//! `tests/configs/others.left` lists the texts that are left out. Each line has the reason (see
//! [`LEFT_OUT`]), and the first place of the text (repository, commit, path and line).

use std::collections::BTreeSet;

use control_plane::config;
use serde::Deserialize;

use crate::configs::golden;

/// The projects whose files were read.
const REPOSITORIES: [&str; 6] = [
    "kserve/kserve",
    "kubernetes-sigs/gateway-api-inference-extension",
    "llm-d/llm-d",
    "llm-d/llm-d-benchmark",
    "llm-d/llm-d-inference-scheduler",
    "llm-d/llm-d-router",
];

const FILE: &str = "tests/configs/others.jsonl"; // tests run in the folder of their crate

/// The texts that are left out.
const LEFT_OUT_FILE: &str = "tests/configs/others.left";

/// Each reason to leave a text out, and the number of texts:
///
/// - `fragment`: the text has dots in place of plugins.
/// - `refused`: the text's own project refuses it, for example in a test of its errors.
/// - `template`: the text is the input of Helm, Jinja or a program, with conditions or with
///   placeholders for plugin types.
/// - `unknown-type`: the text names a plugin type that no picker has. The type exists only in a
///   test, or stands for a type of the reader.
/// - `unmerged`: the text belongs to a change that its project has not taken.
const LEFT_OUT: [(&str, usize); 5] = [
    ("fragment", 6),
    ("refused", 24),
    ("template", 6),
    ("unknown-type", 91),
    ("unmerged", 1),
];

#[derive(Debug, Deserialize)]
struct OtherConfig {
    /// The places of the file: repository, commit and path.
    places: Vec<String>,
    /// The verdict of the daemon.
    verdict: String,
    config: serde_json::Value,
}

/// The parameters of llm-d-router at ebab687927f5 of August 2026, by type, without those of types
/// that are refused here.
#[rustfmt::skip] // The list is a table.
const PARAMETERS: &[&str] = &[
    "label-selector-filter matchLabels matchExpressions",
    "by-label label validValues allowsNoLabel",
    "session-affinity-filter strategy encodedEndpointHeaderConfig sessionIdConfig profileName",
    "session-affinity-scorer strategy encodedEndpointHeaderConfig sessionIdConfig profileName",
    "endpoint-attribute-filter attribute producer onMissing fallbackOnEmpty algorithm",
    "endpoint-attribute-scorer attributeKey producer algorithm",
    "prefix-cache-affinity-filter affinityThreshold explorationProbability maxTTFTPenaltyMs ttftSource peakPrefillThroughput prefixMatchInfoProducerName latencyPredictionInfoProducerName inFlightLoadProducerName",
    "slo-headroom-tier-filter epsilonExploreNeg latencyPredictionInfoProducerName",
    "utilization-filter conditions fallbackOnEmpty inFlightLoadProducerName",
    "max-score-picker maxNumOfEndpoints",
    "random-picker maxNumOfEndpoints",
    "weighted-random-picker maxNumOfEndpoints",
    "data-parallel-profile-handler primaryPort",
    "disagg-profile-handler stageOrder profiles deciders",
    "prefix-based-pd-decider nonCachedTokens promptTokens",
    "header-profile-handler headerName defaultProfile",
    "active-request-scorer requestTimeout idleThreshold maxBusyScore inFlightLoadProducerName",
    "context-length-aware label enableFiltering",
    "header-label-affinity-scorer headerName labelKey",
    "latency-scorer ttftWeight tpotWeight headroomSelectionStrategy compositeKVWeight compositeQueueWeight compositePrefixWeight latencyPredictionInfoProducerName prefixMatchInfoProducerName",
    "load-aware-scorer threshold",
    "no-hit-lru-scorer prefixPluginType prefixPluginName lruSize prefixMatchInfoProducerName",
    "prefix-cache-scorer prefixMatchInfoProducerName matchLengthWeight matchLengthScaleTokens",
    "token-load-scorer queueThresholdTokens inFlightLoadProducerName",
    "program-aware-fairness strategy evictionTtlSeconds evictionSweepSeconds lasWeightService lasWeightHeadWait lasHalfLifeSeconds",
    "concurrency-detector maxConcurrency headroom concurrencyMode maxTokenConcurrency inFlightLoadProducerName",
    "utilization-detector queueDepthThreshold kvCacheUtilThreshold metricsStalenessThreshold headroom",
    "inflight-load-producer addEstimatedOutputTokens outputRatio maxEstimatedOutputTokens prefixMatchInfoProducerName syncCrossReplicaState",
    "latency-slo-admitter latencyPredictionInfoProducerName",
    "probabilistic-admitter queueDepthThreshold kvCacheUtilThreshold power k",
    "agent-identity additionalSessionHeaders",
    "approx-prefix-cache-producer autoTune blockSizeTokens blockSize maxPrefixBlocksToMatch maxPrefixTokensToMatch lruCapacityPerServer",
    "predicted-latency-producer samplingMean maxDecodeTokenSamplesForPrediction sloBufferFactor contextTTL streamingMode endpointRoleLabel predictInProduce prefixMatchInfoProducerName inFlightLoadProducerName useEncoderCacheFeatures encoderCacheMatchInfoProducerName",
];

fn verdict(text: &str) -> (&'static str, String) {
    let (report, _) = config::read(text);
    let verdict = match (report.errors.is_empty(), report.refuses()) {
        (false, _) => "invalid",
        (true, true) => "refused",
        (true, false) => "fine",
    };
    (verdict, report.complaints("f"))
}

#[test]
fn what_other_projects_load_is_fine_or_refused_by_name() {
    let text = std::fs::read_to_string(FILE).unwrap();
    let others: Vec<OtherConfig> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    for other in &others {
        let (verdict, complaints) = verdict(&other.config.to_string());
        assert_eq!(verdict, other.verdict, "{:?}: {complaints}", other.places);
        assert_ne!(verdict, "invalid", "{:?}", other.places);
        assert!(
            complaints.lines().all(|line| line.contains("; instead: ")),
            "{:?}: {complaints}",
            other.places
        );
    }
    let counted = |repository: &str| {
        let files = |verdict: &str| {
            let of = others
                .iter()
                .filter(|other| other.verdict == verdict)
                .flat_map(|other| &other.places);
            of.filter(|place| place.starts_with(&format!("{repository}@")))
                .count()
        };
        (files("fine"), files("refused"))
    };
    let text = REPOSITORIES
        .map(|repository| format!("{repository} {:?}\n", counted(repository)))
        .concat();
    golden(std::path::Path::new(FILE), "counts", &text);
}

#[test]
fn each_text_that_is_left_out_has_a_place_and_a_reason() {
    let text = std::fs::read_to_string(LEFT_OUT_FILE).unwrap();
    let rows: Vec<(&str, &str)> = text
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let places: BTreeSet<&str> = rows.iter().map(|(_, place)| *place).collect();
    assert_eq!(places.len(), rows.len(), "a place is listed twice");
    for place in places {
        let (repository, rest) = place.split_once('@').unwrap();
        let (commit, rest) = rest.split_once(' ').unwrap();
        let (_, line) = rest.rsplit_once(':').unwrap();
        assert!(
            REPOSITORIES.contains(&repository)
                && commit.len() == 12
                && line.parse::<u32>().is_ok_and(|line| line > 0),
            "{place}"
        );
    }
    let counted = LEFT_OUT.map(|(reason, _)| {
        let of = rows.iter().filter(|(given, _)| *given == reason);
        (reason, of.count())
    });
    assert_eq!(counted, LEFT_OUT);
    let known: usize = LEFT_OUT.iter().map(|(_, count)| count).sum();
    assert_eq!(rows.len(), known, "a reason is not in the list");
}

#[test]
fn every_parameter_of_llm_d_is_known() {
    for row in PARAMETERS {
        let (plugin_type, parameters) = row.split_once(' ').unwrap();
        for parameter in parameters.split(' ') {
            let text = format!(
                "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{{type: {plugin_type}, parameters: {{{parameter}: 1}}}}]\n"
            );
            let (_, complaints) = verdict(&text);
            assert!(!complaints.contains("unknown"), "{complaints}");
        }
    }
}
