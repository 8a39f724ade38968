//! What holds for every pipeline there can be: any plugins, profiles and handler, with deciders, a detector and admitters.

use proptest::prelude::*;
use scheduler::plugin::{Kind, PLUGINS};
use scheduler::{Decision, EndpointIndex, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin, ProfileSpec, Readiness, Shed};

use crate::case::{self, Case};
use crate::pools;

/// Handlers with their parameters; each runs the profiles that any pipeline here has, or the only one.
const HANDLERS: [&str; 7] = [
    "single-profile-handler",
    "data-parallel-profile-handler",
    "data-parallel-profile-handler primaryPort=8001",
    "header-profile-handler",
    "disagg-profile-handler",
    "disagg-profile-handler deciders.prefill=prefill-decider",
    "disagg-profile-handler deciders.prefill=prefill-decider deciders.encode=encode-decider",
];

const PROFILES: [&str; 3] = ["decode", "prefill", "encode"];

/// Plugins that a profile may have, none of which needs a parameter.
fn parts() -> impl Strategy<Value = Vec<(&'static str, f64)>> {
    let of = |kinds: &[Kind]| PLUGINS.iter().filter(|plugin| kinds.contains(&plugin.kind)).map(|plugin| plugin.name).collect::<Vec<_>>();
    let buildable = |name: &&str| scheduler::plugin::lookup(name).is_some_and(|row| row.build(&[]).is_ok());
    let parts: Vec<&str> = of(&[Kind::Filter, Kind::Detector, Kind::Scorer]).into_iter().filter(buildable).collect();
    let weight = prop::sample::select(vec![0.0, 1.0, 3.0]);
    let picker = prop::option::of(prop::sample::select(of(&[Kind::Picker])));
    (prop::collection::vec((prop::sample::select(parts), weight), 0..5), picker)
        .prop_map(|(parts, picker)| parts.into_iter().chain(picker.map(|picker| (picker, 1.0))).collect())
}

fn plugin(name: &str, words: &str) -> PluginSpec {
    let mut words = words.split(' ');
    let plugin_type = words.next().unwrap_or_default().to_owned();
    PluginSpec { plugin_type, name: name.to_owned(), parameters: case::parameters(&words.collect::<Vec<_>>()) }
}

/// Any pipeline that can be built.
fn any_pipeline() -> impl Strategy<Value = PipelineSpec> {
    let handler = prop::sample::select(HANDLERS.to_vec());
    let decider = prop::sample::select(vec![
        "always-disagg-pd-decider",
        "always-disagg-multimodal-decider",
        "prefix-based-pd-decider",
        "prefix-based-pd-decider nonCachedTokens=600",
    ]);
    let detector = prop::option::of(prop::sample::select(vec!["utilization-detector", "concurrency-detector maxConcurrency=2"]));
    let admitter = prop::bool::weighted(0.3);
    let profiles = prop::collection::vec(parts(), 3);
    (handler, profiles, (decider.clone(), decider), detector, admitter, 1_u32..=8).prop_map(
        |(handler, profiles, (prefill, encode), detector, admitter, ranked_max)| {
            let several = handler.starts_with("disagg") || handler.starts_with("header");
            let mut plugins = vec![plugin("handler", handler), plugin("prefill-decider", prefill), plugin("encode-decider", encode)];
            plugins.extend(detector.map(|detector| plugin("detector", detector)));
            plugins.extend(admitter.then(|| plugin("admitter", "probabilistic-admitter")));
            let mut built = Vec::new();
            for (name, parts) in PROFILES.into_iter().zip(profiles).take(if several { 3 } else { 1 }) {
                let mut profile = ProfileSpec { name: name.to_owned(), plugins: Vec::new() };
                for (at, (part, weight)) in parts.into_iter().enumerate() {
                    let name = format!("{part} {at} of {name}");
                    plugins.push(plugin(&name, part));
                    profile.plugins.push(ProfilePlugin { name, weight });
                }
                built.push(profile);
            }
            let saturation_detector = detector.map_or("", |_| "detector").to_owned();
            PipelineSpec {
                plugins,
                profiles: built,
                profile_handler: "handler".to_owned(),
                saturation_detector,
                ranked_max,
                latency_prediction: false,
            }
        },
    )
}

/// Any request to any such pipeline; every other endpoint is a second rank at the address before it.
fn any_case() -> impl Strategy<Value = Case> {
    let profile = prop::option::of(prop::sample::select(vec!["decode", "prefill", " encode ", "verify", ""]));
    (pools::case(any_pipeline()), -2..2, 0_u32..3, profile, any::<bool>()).prop_map(|(mut case, priority, media_items, profile, ranks)| {
        case.priority = priority;
        case.media_items = media_items;
        case.headers.extend(profile.map(|profile| ("epp-profile".to_owned(), profile.to_owned())));
        for (at, row) in case.pool.iter_mut().enumerate().filter(|(at, _)| ranks && at % 2 == 1) {
            row.endpoint.address = format!("10.0.0.{at}:8001").into();
        }
        case
    })
}

/// Everyone whom a decision names.
fn named(decision: &Decision) -> Vec<EndpointIndex> {
    if let Decision::Route(route) = decision { route.endpoints().collect() } else { Vec::new() }
}

/// Does the hint allow the address? Told by meaning, apart from the code it checks.
fn allowed(case: &Case, address: &str) -> bool {
    let socket: std::net::SocketAddr = address.parse().unwrap();
    let allows = |entry: &String| entry.trim().parse() == Ok(socket) || entry.trim().parse() == Ok(socket.ip());
    case.subset.as_ref().is_none_or(|entries| entries.iter().any(allows))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn whoever_is_named_is_ready_and_allowed(case in any_case()) {
        let outcome = case.decide().unwrap();
        for index in named(&outcome.decision) {
            let endpoint = &case.pool[index.get()].endpoint;
            prop_assert_eq!(endpoint.readiness, Readiness::Ready);
            prop_assert!(allowed(&case, &endpoint.address), "{} is outside {:?}", endpoint.address, case.subset);
        }
    }

    #[test]
    fn a_list_is_a_list_and_a_stage_another_server(case in any_case()) {
        let outcome = case.decide().unwrap();
        if let Decision::Route(route) = &outcome.decision {
            let ranked: Vec<usize> = route.ranked.iter().map(EndpointIndex::get).collect();
            prop_assert!(ranked.iter().enumerate().all(|(place, at)| !ranked[..place].contains(at)), "{ranked:?}");
            prop_assert!(ranked.len() <= case.pipeline.ranked_max as usize);
            let first = route.ranked.first();
            prop_assert!(route.prefill != Some(first));
            prop_assert!(!route.encode.contains(&route.prefill.unwrap_or(first)), "{route:?}");
            if let Some(rank) = route.data_parallel {
                prop_assert_eq!(ranked.len(), 1, "the header names one rank");
                let ip = |index: EndpointIndex| case.pool[index.get()].endpoint.address.split(':').next().unwrap().to_owned();
                prop_assert_eq!(ip(rank), ip(first));
            }
            if Pipeline::build(&case.pipeline).unwrap().disaggregates() {
                prop_assert!(route.ranked.iter().all(|index| case.pool[index.get()].endpoint.decodes()));
            }
        }
    }

    #[test]
    fn same_seed_same_decision_with_and_without_reasons(case in any_case()) {
        let outcome = case.decide().unwrap();
        prop_assert_eq!(&case.decide().unwrap(), &outcome);
        prop_assert_eq!(case.decide_with(&case.snapshot().unwrap(), &case.in_flight(), None), outcome.decision);
    }

    #[test]
    fn nobody_is_shed_but_the_sheddable(case in any_case()) {
        let decision = case.decide().unwrap().decision;
        if case.priority >= 0 {
            prop_assert!(!matches!(decision, Decision::Shed(_)), "{decision:?}");
        }
        let has_admitter = case.pipeline.plugins.iter().any(|plugin| plugin.name == "admitter");
        prop_assert!(has_admitter || decision != Decision::Shed(Shed::Admitter));
    }

    #[test]
    fn where_somebody_answers_an_ejection_refuses_nobody(case in any_case()) {
        let mut calm = case.clone();
        calm.pool.iter_mut().for_each(|row| row.ejected = false);
        let (ejected, calm) = (case.decide().unwrap().decision, calm.decide().unwrap().decision);
        prop_assert_eq!(matches!(ejected, Decision::Unavailable(_)), matches!(calm, Decision::Unavailable(_)), "{:?} and {:?}", ejected, calm);
    }

    #[test]
    fn every_score_is_from_0_to_1_and_every_total_finite(case in any_case()) {
        for profile in case.decide().unwrap().explanation.profiles {
            for (_, score) in profile.scores.iter().flat_map(|column| &column.scores) {
                prop_assert!((0.0..=1.0).contains(score), "{score}");
            }
            prop_assert!(profile.totals.iter().all(|(_, total)| total.is_finite() && *total >= 0.0));
        }
    }
}
