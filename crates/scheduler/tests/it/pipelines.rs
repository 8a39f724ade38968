//! Properties of every possible pipeline: any plugins, profiles and handler, with deciders, a
//! detector and admitters.

use proptest::prelude::*;
use scheduler::latency::step::StepModel;
use scheduler::registry::{PLUGINS, PluginKind};
use scheduler::{
    Decision, EndpointIndex, PROFILES_MAX, Pipeline, PipelineSpec, PluginSpec, ProfilePlugin,
    ProfileSpec, Readiness, ShedReason, Stage,
};

use crate::case::{self, DecisionCase};
use crate::pools;

/// Handlers with their parameters. Each handler runs profiles that every pipeline here has, or the
/// only profile.
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

/// Generates plugins that a profile may have and that need no parameter.
fn parts() -> impl Strategy<Value = Vec<(&'static str, f64)>> {
    let of = |kinds: &[PluginKind]| {
        PLUGINS
            .iter()
            .filter(|plugin| kinds.contains(&plugin.kind))
            .map(|plugin| plugin.name)
            .collect::<Vec<_>>()
    };
    let buildable =
        |name: &&str| scheduler::registry::lookup(name).is_some_and(|row| row.build(&[]).is_ok());
    let parts: Vec<&str> = of(&[PluginKind::Filter, PluginKind::Detector, PluginKind::Scorer])
        .into_iter()
        .filter(buildable)
        .collect();
    let weight = prop::sample::select(vec![0.0, 1.0, 3.0]);
    let picker = prop::option::of(prop::sample::select(of(&[PluginKind::Picker])));
    (
        prop::collection::vec((prop::sample::select(parts), weight), 0..5),
        picker,
    )
        .prop_map(|(parts, picker)| {
            parts
                .into_iter()
                .chain(picker.map(|picker| (picker, 1.0)))
                .collect()
        })
}

fn plugin(name: &str, words: &str) -> PluginSpec {
    let mut words = words.split(' ');
    let plugin_type = words.next().unwrap_or_default().to_owned();
    PluginSpec {
        plugin_type,
        name: name.to_owned(),
        parameters: case::parameters(&words.collect::<Vec<_>>()),
    }
}

/// Generates any pipeline that builds.
fn any_pipeline() -> impl Strategy<Value = PipelineSpec> {
    let handler = prop::sample::select(HANDLERS.to_vec());
    let decider = prop::sample::select(vec![
        "always-disagg-pd-decider",
        "always-disagg-multimodal-decider",
        "prefix-based-pd-decider",
        "prefix-based-pd-decider nonCachedTokens=600",
    ]);
    let detector = prop::option::of(prop::sample::select(vec![
        "utilization-detector",
        "concurrency-detector maxConcurrency=2",
    ]));
    let admitter = prop::bool::weighted(0.3);
    let profiles = prop::collection::vec(parts(), 3);
    (
        handler,
        profiles,
        (decider.clone(), decider),
        detector,
        admitter,
        1_u32..=8,
    )
        .prop_map(
            |(handler, profiles, (prefill, encode), detector, admitter, ranked_max)| {
                let several = handler.starts_with("disagg") || handler.starts_with("header");
                let mut plugins = vec![
                    plugin("handler", handler),
                    plugin("prefill-decider", prefill),
                    plugin("encode-decider", encode),
                ];
                plugins.extend(detector.map(|detector| plugin("detector", detector)));
                plugins.extend(admitter.then(|| plugin("admitter", "probabilistic-admitter")));
                let mut built = Vec::new();
                for (name, parts) in
                    PROFILES
                        .into_iter()
                        .zip(profiles)
                        .take(if several { 3 } else { 1 })
                {
                    let mut profile = ProfileSpec {
                        name: name.to_owned(),
                        plugins: Vec::new(),
                    };
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

/// Generates any request to any of these pipelines. Every second endpoint is a second rank at the
/// address of the endpoint before it.
fn any_case() -> impl Strategy<Value = DecisionCase> {
    let profile = prop::option::of(prop::sample::select(vec![
        "decode", "prefill", " encode ", "verify", "",
    ]));
    (
        pools::case(any_pipeline()),
        -2..2,
        0_u32..3,
        profile,
        any::<bool>(),
    )
        .prop_map(|(mut case, priority, media_items, profile, ranks)| {
            case.request.priority = priority;
            case.request.media_items = media_items;
            case.request
                .headers
                .extend(profile.map(|profile| ("epp-profile".to_owned(), profile.to_owned())));
            for (at, row) in case
                .pool
                .iter_mut()
                .enumerate()
                .filter(|(at, _)| ranks && at % 2 == 1)
            {
                row.endpoint.address = format!("10.0.0.{at}:8001").into();
            }
            case
        })
}

fn named(decision: &Decision) -> Vec<EndpointIndex> {
    if let Decision::Route(route) = decision {
        route.endpoints().collect()
    } else {
        Vec::new()
    }
}

/// Returns whether the hint allows the address, checked by meaning, independently of the code under
/// test.
fn allowed(case: &DecisionCase, address: &str) -> bool {
    let socket: std::net::SocketAddr = address.parse().unwrap();
    let allows = |entry: &String| {
        entry.trim().parse() == Ok(socket) || entry.trim().parse() == Ok(socket.ip())
    };
    case.request
        .subset
        .as_ref()
        .is_none_or(|entries| entries.iter().any(allows))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn every_named_endpoint_is_ready_and_allowed(case in any_case()) {
        let outcome = case.decide().unwrap();
        for index in named(&outcome.decision) {
            let endpoint = &case.pool[index.get()].endpoint;
            prop_assert_eq!(endpoint.readiness, Readiness::Ready);
            prop_assert!(allowed(&case, &endpoint.address), "{} is outside {:?}", endpoint.address, case.request.subset);
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
    fn only_sheddable_requests_are_shed(case in any_case()) {
        let decision = case.decide().unwrap().decision;
        if case.request.priority >= 0 {
            prop_assert!(!matches!(decision, Decision::Shed(_)), "{decision:?}");
        }
        let has_admitter = case.pipeline.plugins.iter().any(|plugin| plugin.name == "admitter");
        prop_assert!(has_admitter || decision != Decision::Shed(ShedReason::Admitter));
    }

    #[test]
    fn an_ejection_never_causes_a_refusal(case in any_case()) {
        let mut calm = case.clone();
        calm.pool.iter_mut().for_each(|row| row.ejected = false);
        let ejected = case.decide().unwrap().decision;
        let calm = calm.decide().unwrap().decision;
        // The converse does not hold: a filter may prefer an endpoint that the next filter drops,
        // and then ejecting it helps.
        let refused = matches!(ejected, Decision::Unavailable(_)) && !matches!(calm, Decision::Unavailable(_));
        prop_assert!(!refused, "{:?} and {:?}", ejected, calm);
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

/// Returns a pipeline with these plugins by name, and profiles without plugins.
fn bare(handler: &str, plugins: &[(&str, &str)], profiles: &[&str]) -> PipelineSpec {
    let declared = [("handler", handler)]
        .into_iter()
        .chain(plugins.iter().copied());
    PipelineSpec {
        plugins: declared.map(|(name, words)| plugin(name, words)).collect(),
        profiles: profiles
            .iter()
            .map(|name| ProfileSpec {
                name: (*name).to_owned(),
                plugins: Vec::new(),
            })
            .collect(),
        profile_handler: "handler".to_owned(),
        ..PipelineSpec::default()
    }
}

fn built(handler: &str, plugins: &[(&str, &str)], profiles: &[&str]) -> Pipeline {
    Pipeline::build(&bare(handler, plugins, profiles)).unwrap()
}

#[test]
fn what_a_handler_refers_to_must_be_there() {
    let decider = ("d", "always-disagg-pd-decider");
    for (handler, plugins, profiles, missing) in [
        ("data-parallel-profile-handler", &[][..], &["a"][..], None),
        (
            "data-parallel-profile-handler",
            &[],
            &["a", "b"],
            Some("profile"),
        ),
        ("header-profile-handler", &[], &["a"], None), // the only profile runs, whatever its name
        ("header-profile-handler", &[], &["decode", "b"], None),
        ("header-profile-handler", &[], &["a", "b"], Some("`decode`")),
        ("disagg-profile-handler", &[], &["decode"], None),
        ("disagg-profile-handler", &[], &["a"], Some("`decode`")),
        (
            "disagg-profile-handler deciders.prefill=d",
            &[decider],
            &["decode", "prefill"],
            None,
        ),
        (
            "disagg-profile-handler deciders.prefill=d",
            &[decider],
            &["decode"],
            Some("`prefill`"),
        ),
        (
            "disagg-profile-handler deciders.prefill=d",
            &[],
            &["decode", "prefill"],
            Some("`d`"),
        ),
        ("slo-aware-profile-handler", &[], &["default", "slo"], None),
        (
            "slo-aware-profile-handler",
            &[],
            &["default"],
            Some("`slo`"),
        ),
        (
            "slo-aware-profile-handler",
            &[],
            &["slo"],
            Some("`default`"),
        ),
    ] {
        let refusal = Pipeline::build(&bare(handler, plugins, profiles))
            .err()
            .map(|error| error.to_string());
        assert_eq!(
            refusal.is_some(),
            missing.is_some(),
            "{handler} {profiles:?}: {refusal:?}"
        );
        assert!(
            refusal
                .unwrap_or_default()
                .contains(missing.unwrap_or_default()),
            "{handler} {profiles:?}"
        );
    }
}

#[test]
fn of_several_handlers_the_one_that_is_named_is_in_force() {
    let others = [
        ("other", "data-parallel-profile-handler"),
        ("disagg", "disagg-profile-handler"),
    ];
    assert!(!built("header-profile-handler", &others, &["decode", "b"]).disaggregates());
    assert!(
        built(
            "disagg-profile-handler",
            &[("other", "single-profile-handler")],
            &["decode", "b"]
        )
        .disaggregates()
    );
}

#[test]
fn of_several_detectors_the_one_that_is_named_is_in_force() {
    let text = "plugins\n  concurrency-detector maxConcurrency=3\n  utilization-detector\n\nprofile\n\npool\n  name  in_flight\n  a     3\n\nrequest\n  priority -1\n";
    let mut case = DecisionCase::parse(text).unwrap();
    for (named, shed) in [
        ("concurrency-detector", true),
        ("utilization-detector", false),
    ] {
        case.pipeline.saturation_detector = named.to_owned();
        assert_eq!(
            matches!(case.decide().unwrap().decision, Decision::Shed(_)),
            shed,
            "{named}"
        );
    }
}

#[test]
fn what_a_handler_says_of_requests_the_pipeline_says() {
    let demands = |handler: &str, latency_prediction| {
        Pipeline::build(&PipelineSpec {
            latency_prediction,
            ..bare(handler, &[], &["default", "slo"])
        })
        .unwrap()
        .demands_slo()
    };
    assert!(demands("slo-aware-profile-handler", true));
    assert!(!demands("slo-aware-profile-handler", false));
    assert!(!demands(
        "slo-aware-profile-handler sloMissing=default",
        true
    ));
    let predicting = PipelineSpec {
        latency_prediction: true,
        ..bare("single-profile-handler", &[], &["a"])
    };
    assert!(!Pipeline::build(&predicting).unwrap().demands_slo());
    let deciders = [("d", "always-disagg-pd-decider")];
    let stages = |handler: &str| {
        PROFILES.map(|profile| built(handler, &deciders, &PROFILES).stage_of(profile))
    };
    assert_eq!(
        stages("disagg-profile-handler"),
        [Stage::Serving; 3],
        "a stage without a decider is never run elsewhere"
    );
    let both = "disagg-profile-handler deciders.prefill=d deciders.encode=d";
    assert_eq!(
        stages(both),
        [Stage::Serving, Stage::Prefill, Stage::Encode]
    );
}

#[test]
fn the_headers_that_plugins_read_are_listed_once_in_lower_case() {
    let without = built("single-profile-handler", &[], &["a"]).headers().len();
    let headers = |handler: &str, plugins: &[(&str, &str)]| -> Vec<String> {
        let mut headers: Vec<String> = built(handler, plugins, &["a"])
            .headers()
            .iter()
            .map(|name| name.to_string())
            .collect();
        assert!(headers.len() >= without);
        // The removed headers are those of agent-identity, which every pipeline has.
        headers.truncate(headers.len() - without);
        headers
    };
    assert_eq!(headers("header-profile-handler", &[]), ["epp-profile"]);
    assert_eq!(
        headers(
            "single-profile-handler",
            &[("f", "session-affinity-filter strategy=session_id")]
        ),
        ["x-session-id"]
    );
    let label = "header-label-affinity-scorer headerName=X-Zone labelKey=zone";
    let scorers = [
        ("s", "session-affinity-scorer"),
        ("again", "session-affinity-scorer"),
        ("l", label),
    ];
    assert_eq!(
        headers("single-profile-handler", &scorers),
        ["x-session-token", "x-zone"]
    );
}

#[test]
fn session_headers_are_listed_once() {
    let token = |header: &str| format!("encodedEndpointHeaderConfig.header={header}");
    let filter = format!("session-affinity-filter {}", token("x-a"));
    let scorer = format!("session-affinity-scorer {}", token("x-b"));
    let pipeline = built(
        "single-profile-handler",
        &[("f", &filter), ("s", &scorer), ("again", &scorer)],
        &["a"],
    );
    assert_eq!(
        pipeline
            .session_tokens()
            .iter()
            .map(|token| &*token.header)
            .collect::<Vec<_>>(),
        ["x-a", "x-b"]
    );
    let by_id = built(
        "single-profile-handler",
        &[("s", "session-affinity-scorer strategy=session_id")],
        &["a"],
    );
    assert!(by_id.session_tokens().is_empty());
}

#[test]
fn what_producers_set_is_in_force_by_being_declared() {
    let tokens = |plugins: &[(&str, &str)]| {
        built("single-profile-handler", plugins, &["a"])
            .production()
            .prefix
            .block_tokens
    };
    assert_eq!(
        (
            tokens(&[]),
            tokens(&[("p", "approx-prefix-cache-producer blockSizeTokens=128")])
        ),
        (64, 128)
    );
}

#[test]
fn profiles_are_bounded() {
    let names: Vec<String> = (0..=PROFILES_MAX).map(|n| format!("p{n}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let refusal = |count: usize| {
        Pipeline::build(&bare(
            "header-profile-handler defaultProfile=p0",
            &[],
            &names[..count],
        ))
        .err()
    };
    assert_eq!(refusal(PROFILES_MAX), None);
    assert_eq!(
        refusal(PROFILES_MAX + 1).map(|error| error.to_string()),
        Some("33 profiles, at most 32 are allowed".to_owned())
    );
}

#[test]
fn required_parameters_must_be_given() {
    let refused = |words: &str| {
        Pipeline::build(&bare("single-profile-handler", &[("p", words)], &["a"])).is_err()
    };
    assert_eq!(
        [
            "by-label label=tier",
            "by-label label=tier allowsNoLabel=true"
        ]
        .map(refused),
        [true, false]
    );
    let older = "endpoint-attribute-scorer algorithm.type=linear_higher_is_better attributeKey=key/producer";
    let ours = format!("{older} producer=core-metrics-extractor");
    assert_eq!([older, &ours].map(refused), [true, false]);
}

#[test]
fn where_decoding_is_slow_a_request_costs_more_itself_and_by_those_it_slows_down() {
    for (parameters, in_flight) in [("", 0), ("externality=100", 8)] {
        let text = format!(
            "profile\n  marginal-cost-scorer {parameters}\n\npool\n  name  in_flight\n  slow  {in_flight}\n  fast  {in_flight}\n\nrequest\n  prompt_tokens 100\n"
        );
        let case = DecisionCase::parse(&text).unwrap();
        let slow = case.pool[0].endpoint.id;
        let step = StepModel::from_parts([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], 100.0)
            .with_speed(slow, 1.0, 4.0);
        let snapshot = case
            .snapshot()
            .unwrap()
            .with_step(std::sync::Arc::new(step));
        let first = named(&case.decide_with(&snapshot, &case.in_flight(), None))[0];
        assert_eq!(first.get(), 1, "{in_flight}");
    }
}
