use super::*;
use crate::plugin::ParameterValue;

fn spec(plugins: Vec<(PluginSpec, f64)>) -> PipelineSpec {
    PipelineSpec::of_one_profile("test", plugins, 3)
}

fn plugin(
    plugin_type: &str,
    name: &str,
    weight: f64,
    parameters: &[(&str, f64)],
) -> (PluginSpec, f64) {
    let parameters = parameters
        .iter()
        .map(|&(name, value)| (name.to_owned(), ParameterValue::Number(value)))
        .collect();
    (
        PluginSpec {
            plugin_type: plugin_type.to_owned(),
            name: name.to_owned(),
            parameters,
        },
        weight,
    )
}

fn refusal(spec: &PipelineSpec) -> String {
    Pipeline::build(spec).unwrap_err().to_string()
}

fn scorers(pipeline: &Pipeline) -> Vec<(&str, f32)> {
    pipeline
        .profiles()
        .only()
        .unwrap()
        .scorers
        .iter()
        .map(|(name, weight, _)| (&**name, *weight))
        .collect()
}

#[test]
fn the_default_pipeline_builds() {
    let pipeline = Pipeline::build(&PipelineSpec::default()).unwrap();
    assert_eq!(scorers(&pipeline), [("marginal-cost-scorer", 1.0)]);
    assert_eq!(pipeline.profiles().only().unwrap().ranked_max, 3);
    assert_eq!(
        pipeline.production(),
        &ProducerSettings::with_defaults().unwrap()
    );
    assert!(pipeline.session_tokens().is_empty() && !pipeline.disaggregates());
}

#[test]
fn names_weights_and_the_missing_picker() {
    let pipeline = Pipeline::build(&spec(vec![
        plugin("queue-scorer", "", 0.0, &[]),
        plugin("queue-scorer", "again", 1e6, &[]),
    ]))
    .unwrap();
    assert_eq!(
        scorers(&pipeline),
        [("queue-scorer", 0.0), ("again", 1e6)],
        "without a name it goes by its type"
    );
    assert_eq!(
        format!("{:?}", pipeline.profiles().only().unwrap().picker),
        "MaxScorePicker"
    );
}

#[test]
fn a_pickers_list_length_stands_over_the_pipelines() {
    let length = |given| {
        let picker = plugin("random-picker", "", 1.0, &[("maxNumOfEndpoints", given)]);
        Pipeline::build(&spec(vec![picker]))
            .map(|pipeline| pipeline.profiles().only().unwrap().ranked_max)
    };
    assert_eq!(length(1.0).unwrap(), 1);
    assert_eq!(length(8.0).unwrap(), 8);
    assert_eq!(length(0.0).unwrap(), 3);
    assert_eq!(
        length(9.0).unwrap_err().to_string(),
        "plugin `random-picker`: parameter `maxNumOfEndpoints` is out of range: length of the ranked list, integer from 1 to 8; 0 uses the profile's length"
    );
}

#[test]
fn refusals_name_the_cause_and_the_allowed_values() {
    assert!(
        refusal(&spec(vec![plugin("queue-score", "", 1.0, &[])]))
            .starts_with("unknown plugin type `queue-score`; did you mean `queue-scorer`?; known: `queue-scorer`, ")
    );
    let threshold = spec(vec![plugin(
        "token-load-scorer",
        "load",
        1.0,
        &[("threshold", 1.0)],
    )]);
    assert_eq!(
        refusal(&threshold),
        "plugin `load`: unknown parameter `threshold`; known: `queueThresholdTokens`"
    );
    let cause = std::error::Error::source(&Pipeline::build(&threshold).unwrap_err())
        .map(ToString::to_string);
    assert_eq!(
        cause.as_deref(),
        Some("unknown parameter `threshold`; known: `queueThresholdTokens`")
    );
    for weight in [-1.0, f64::NAN, f64::INFINITY, 1e6 + 1.0] {
        assert_eq!(
            refusal(&spec(vec![plugin("queue-scorer", "q", weight, &[])])),
            "plugin `q`: a weight is a number from 0 to 1000000"
        );
    }
    assert_eq!(
        refusal(&spec(vec![
            plugin("random-picker", "a", 1.0, &[]),
            plugin("max-score-picker", "b", 1.0, &[])
        ])),
        "two pickers, `a` and `b`: a profile has one"
    );
    for ranked_max in [0, 9] {
        let spec = PipelineSpec {
            ranked_max,
            ..PipelineSpec::default()
        };
        assert_eq!(
            refusal(&spec),
            format!("a ranked list of {ranked_max} endpoints; 1 to 8 are allowed")
        );
    }
}

#[test]
fn no_more_than_there_may_be() {
    let queues = |count: usize| {
        spec(
            (0..count)
                .map(|at| plugin("queue-scorer", &format!("q{at}"), 1.0, &[]))
                .collect(),
        )
    };
    assert!(Pipeline::build(&queues(64)).is_ok());
    assert_eq!(refusal(&queues(65)), "65 plugins, at most 64 are allowed");
    let mut often = queues(1);
    often.profiles[0].plugins = vec![
        ProfilePlugin {
            name: "q0".to_owned(),
            weight: 1.0
        };
        65
    ];
    assert_eq!(refusal(&often), "65 plugins, at most 64 are allowed");
    let profile = |at| ProfileSpec {
        name: format!("p{at}"),
        plugins: Vec::new(),
    };
    let many = PipelineSpec {
        profiles: (0..33).map(profile).collect(),
        ..queues(1)
    };
    assert_eq!(refusal(&many), "33 profiles, at most 32 are allowed");
}

#[test]
fn names_are_taken_once_and_found() {
    assert_eq!(
        refusal(&spec(vec![
            plugin("queue-scorer", "", 1.0, &[]),
            plugin("random-picker", "queue-scorer", 1.0, &[])
        ])),
        "the name `queue-scorer` is used twice"
    );
    let mut twice = PipelineSpec::default();
    twice.profiles.push(twice.profiles[0].clone());
    assert_eq!(refusal(&twice), "the name `default` is used twice");
    let mut absent = PipelineSpec::default();
    absent.profiles[0].plugins.push(ProfilePlugin {
        name: "absent".to_owned(),
        weight: 1.0,
    });
    assert_eq!(
        refusal(&absent),
        "profile `default` refers to `absent`, which is not a plugin"
    );
    let mut picker = PipelineSpec {
        profile_handler: "max-score-picker".to_owned(),
        ..PipelineSpec::default()
    };
    assert_eq!(
        refusal(&picker),
        "the pipeline refers to `max-score-picker`, which is not a profile handler"
    );
    picker.profile_handler.clear();
    picker.saturation_detector = "absent".to_owned();
    assert_eq!(
        refusal(&picker),
        "the pipeline refers to `absent`, which is not a saturation detector"
    );
    let none = PipelineSpec {
        profiles: Vec::new(),
        ..PipelineSpec::default()
    };
    assert_eq!(
        refusal(&none),
        "there are 0 profiles, but the profile handler needs exactly one"
    );
}

#[test]
fn requests_are_read_by_the_parsers_declared_or_by_all() {
    let reads = |parsers: &[&str]| {
        let plugins = parsers
            .iter()
            .map(|parser| plugin(parser, "", 1.0, &[]))
            .chain([plugin("random-picker", "", 1.0, &[])]);
        let mut spec = spec(plugins.collect());
        spec.profiles[0]
            .plugins
            .retain(|part| part.name == "random-picker");
        let pipeline = Pipeline::build(&spec).unwrap();
        ["openai-parser", "anthropic-parser"].map(|parser| pipeline.reads(parser))
    };
    assert_eq!(reads(&[]), [true, true]);
    assert_eq!(
        reads(&["anthropic-parser", "passthrough-parser"]),
        [false, true]
    );
    assert_eq!(reads(&["passthrough-parser"]), [false, false]);
}

#[test]
fn the_weight_of_a_plugin_that_is_not_a_scorer_is_ignored() {
    assert!(Pipeline::build(&spec(vec![plugin("random-picker", "", f64::NAN, &[])])).is_ok());
}
