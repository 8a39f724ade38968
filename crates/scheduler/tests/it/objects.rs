//! Resolution of models by a pool's objects: readable cases, and properties.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use scheduler::Rng;
use scheduler::objects::{
    Criticality, InvalidObjects, ModelRequest, ModelSpec, NAME_BYTES_MAX, NAMES_BYTES_MAX,
    OBJECTS_MAX, ObjectiveSpec, Objects, ObjectsSpec, ResolvedModel, RewriteSpec,
    TARGET_WEIGHT_MAX, TARGETS_MAX, TargetSpec, UnknownModel,
};

#[test]
fn a_strict_pool_knows_what_metadata_names_until_models_are_listed() {
    let asked = |spec: &ObjectsSpec, model: &str, rewrite| {
        let objects = Objects::build(spec).unwrap();
        let asked = ModelRequest {
            model,
            objective: None,
            rewrite,
        };
        objects
            .resolve(asked, |name| name == "named", &mut Rng::seeded(1))
            .is_ok()
    };
    let strict = ObjectsSpec {
        strict_models: true,
        ..ObjectsSpec::default()
    };
    assert_eq!(
        [("named", None), ("other", None)].map(|(model, rewrite)| asked(&strict, model, rewrite)),
        [true, false]
    );
    assert!(
        asked(&strict, "named", Some("named")) && !asked(&strict, "named", Some("other")),
        "a header reaches no more than a body"
    );
    let models = vec![ModelSpec {
        name: "listed".to_owned(),
        priority: 0,
        targets: vec![],
    }];
    let listed = ObjectsSpec { models, ..strict };
    assert!(
        asked(&listed, "listed", None) && !asked(&listed, "named", None),
        "a list of models is whole"
    );
}

#[test]
fn every_case_is_resolved_as_it_says() {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/objects/cases.txt"),
    )
    .unwrap();
    let mut spec = ObjectsSpec::default();
    let mut said = String::new();
    for line in text.lines().filter(|line| !line.starts_with("=> ")) {
        said.push_str(line);
        said.push('\n');
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            [""] => spec = ObjectsSpec::default(),
            ["#", ..] => {}
            ["strict"] => spec.strict_models = true,
            ["objective", name, priority] => {
                spec.objectives.push(ObjectiveSpec {
                    name: (*name).to_owned(),
                    priority: priority.parse().unwrap(),
                });
            }
            ["model", name, criticality, targets @ ..] => {
                let priority = criticality_of(criticality).priority();
                spec.models.push(ModelSpec {
                    name: (*name).to_owned(),
                    priority,
                    targets: targets.iter().map(|t| target(t)).collect(),
                });
            }
            ["rewrite", models, "->", targets @ ..] => {
                let models = if *models == "*" {
                    Vec::new()
                } else {
                    models.split(',').map(str::to_owned).collect()
                };
                spec.rewrites.push(RewriteSpec {
                    models,
                    targets: targets.iter().map(|t| target(t)).collect(),
                });
            }
            ["ask", model, rest @ ..] => {
                let given = |key: &str| rest.iter().find_map(|word| word.strip_prefix(key));
                let model = if *model == "-" { "" } else { model };
                said.push_str(&format!(
                    "=> {}\n",
                    outcome(
                        &spec,
                        ModelRequest {
                            model,
                            objective: given("objective="),
                            rewrite: given("header=")
                        }
                    )
                ));
            }
            _ => panic!("no such line: {line}"),
        }
    }
    assert!(said == text, "resolved otherwise:\n{said}");
}

fn criticality_of(text: &str) -> Criticality {
    match text {
        "Critical" => Criticality::Critical,
        "Sheddable" => Criticality::Sheddable,
        _ => Criticality::Standard,
    }
}

fn target(text: &str) -> TargetSpec {
    let (model, weight) = text
        .split_once(':')
        .map_or((text, None), |(model, weight)| {
            (model, Some(weight.parse().unwrap()))
        });
    TargetSpec {
        model: model.to_owned(),
        weight,
    }
}

/// Returns the outcome in words, over many draws. Shares are rounded to tens, which so many draws
/// cannot miss.
fn outcome(spec: &ObjectsSpec, asked: ModelRequest<'_>) -> String {
    const DRAWS: u32 = 10_000;
    let objects = Objects::build(spec).unwrap();
    let mut shares = BTreeMap::new();
    let mut rng = Rng::seeded(7);
    let mut last = 0;
    for _ in 0..DRAWS {
        match objects.resolve(asked, |_| false, &mut rng) {
            Err(UnknownModel(model)) => return format!("unknown model {model}"),
            Ok(ResolvedModel {
                target_model,
                priority,
            }) => {
                *shares
                    .entry(target_model.unwrap_or(asked.model).to_owned())
                    .or_insert(0_u32) += 1;
                last = priority;
            }
        }
    }
    let models = match shares.keys().next().map(String::as_str) {
        Some("") => "as it is".to_owned(),
        Some(only) if shares.len() == 1 => only.to_owned(),
        _ => shares
            .iter()
            .map(|(model, n)| format!("{model} {}", (n + DRAWS / 20) / (DRAWS / 10) * 10))
            .collect::<Vec<_>>()
            .join(", "),
    };
    format!("{models}, priority {last}")
}

/// Generates few names, so that objects and requests meet.
fn any_name() -> impl Strategy<Value = String> {
    select(vec!["a", "b", "c", "d"]).prop_map(str::to_owned)
}

fn any_targets() -> impl Strategy<Value = Vec<TargetSpec>> {
    vec(
        (any_name(), proptest::option::of(0..4_u32))
            .prop_map(|(model, weight)| TargetSpec { model, weight }),
        0..4,
    )
}

fn any_spec() -> impl Strategy<Value = ObjectsSpec> {
    let objective =
        (any_name(), any::<i32>()).prop_map(|(name, priority)| ObjectiveSpec { name, priority });
    let model =
        (any_name(), -1..=1, any_targets()).prop_map(|(name, priority, targets)| ModelSpec {
            name,
            priority,
            targets,
        });
    let rule = (vec(any_name(), 0..3), any_targets())
        .prop_map(|(models, targets)| RewriteSpec { models, targets });
    (
        vec(objective, 0..4),
        vec(model, 0..4),
        vec(rule, 0..4),
        any::<bool>(),
    )
        .prop_map(
            |(objectives, models, rewrites, strict_models)| ObjectsSpec {
                objectives,
                models,
                rewrites,
                strict_models,
            },
        )
}

/// The rules of the resolution again, without tables: each lookup is a loop over the spec.
mod oracle {
    use super::*;

    pub(super) fn known(spec: &ObjectsSpec, model: &str) -> bool {
        match spec.models.as_slice() {
            [] => {
                !spec.strict_models
                    || spec
                        .rewrites
                        .iter()
                        .any(|rule| rule.models.iter().any(|m| m == model))
            }
            models => models.iter().any(|m| m.name == model),
        }
    }

    /// Returns the targets that apply to a model.
    pub(super) fn targets<'s>(spec: &'s ObjectsSpec, model: &str) -> Option<&'s [TargetSpec]> {
        let own = spec
            .models
            .iter()
            .find(|m| m.name == model)
            .map(|m| m.targets.as_slice())
            .filter(|t| !t.is_empty());
        let exact = spec
            .rewrites
            .iter()
            .find(|rule| rule.models.iter().any(|m| m == model));
        let rule = exact.or_else(|| spec.rewrites.iter().find(|rule| rule.models.is_empty()));
        own.or_else(|| rule.map(|rule| rule.targets.as_slice()))
    }

    /// Returns the targets that may be drawn.
    pub(super) fn eligible(targets: &[TargetSpec]) -> Vec<&str> {
        let weighted = targets.iter().any(|t| t.weight.is_some());
        targets
            .iter()
            .filter(|t| t.weight.unwrap_or(u32::from(!weighted)) > 0)
            .map(|t| t.model.as_str())
            .collect()
    }

    pub(super) fn priority(spec: &ObjectsSpec, model: &str) -> i32 {
        spec.models
            .iter()
            .find(|m| m.name == model)
            .map_or(0, |m| m.priority)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    #[test]
    fn tables_say_what_the_objects_say(
        spec in any_spec(), model in any_name(), objective in proptest::option::of(any_name()), header in proptest::option::of(any_name()), seed: u64
    ) {
        let objects = Objects::build(&spec).unwrap();
        let asked = ModelRequest { model: &model, objective: objective.as_deref(), rewrite: header.as_deref() };
        let resolved = objects.resolve(asked, |_| false, &mut Rng::seeded(seed));
        let targets = oracle::targets(&spec, &model);
        if !oracle::known(&spec, &model) {
            prop_assert_eq!(resolved, Err(UnknownModel(&model)));
            return Ok(());
        }
        let mut priority = oracle::priority(&spec, &model);
        let allowed = match (targets, &header) {
            (Some([]), _) | (None, None) => vec![model.as_str()],
            (Some(targets), _) => oracle::eligible(targets),
            (None, Some(header)) if !oracle::known(&spec, header) => {
                prop_assert_eq!(resolved, Err(UnknownModel(header)));
                return Ok(());
            }
            (None, Some(header)) => {
                priority = priority.min(oracle::priority(&spec, header));
                vec![header.as_str()]
            }
        };
        if let Some(chosen) = objective.as_ref().and_then(|name| spec.objectives.iter().find(|o| o.name == *name)) {
            priority = chosen.priority;
        }
        match resolved {
            Err(UnknownModel(unknown)) => prop_assert!(allowed.is_empty() && unknown == model),
            Ok(resolved) => {
                prop_assert!(allowed.contains(&resolved.target_model.unwrap_or(&model)), "{:?} of {:?}", resolved, allowed);
                prop_assert_ne!(resolved.target_model, Some(model.as_str()), "what is asked for needs no rewriting");
                prop_assert_eq!(resolved.priority, priority);
            }
        }
    }

    #[test]
    fn a_header_reaches_no_model_that_the_body_could_not(spec in any_spec(), model in any_name(), header in any_name(), seed: u64) {
        let objects = Objects::build(&spec).unwrap();
        let asked = |model, rewrite| objects.resolve(ModelRequest { model, objective: None, rewrite }, |_| false, &mut Rng::seeded(seed));
        let with = asked(&model, Some(header.as_str()));
        let without = asked(&model, None);
        prop_assert!(with.is_err() || without.is_ok());
        if let (Ok(with), Ok(without)) = (with, without) && with != without {
            prop_assert!(oracle::known(&spec, &header));
            prop_assert!(with.priority <= without.priority && with.priority <= oracle::priority(&spec, &header));
        }
    }

    #[test]
    fn shares_are_those_of_the_weights(weights in vec(0..1000_u32, 1..6), seed: u64) {
        prop_assume!(weights.iter().sum::<u32>() > 0);
        let targets = weights.iter().enumerate().map(|(i, w)| TargetSpec { model: format!("t{i}"), weight: Some(*w) }).collect();
        let spec = ObjectsSpec { rewrites: vec![RewriteSpec { models: vec![], targets }], ..ObjectsSpec::default() };
        let objects = Objects::build(&spec).unwrap();
        let mut rng = Rng::seeded(seed);
        let mut drawn = vec![0_u32; weights.len()];
        const DRAWS: u32 = 4_000;
        for _ in 0..DRAWS {
            let target = objects.resolve(ModelRequest { model: "m", ..ModelRequest::default() }, |_| false, &mut rng).unwrap().target_model.unwrap();
            drawn[target[1..].parse::<usize>().unwrap()] += 1;
        }
        let total = f64::from(weights.iter().sum::<u32>());
        for (n, weight) in drawn.iter().zip(&weights) {
            let share = f64::from(*n) / f64::from(DRAWS);
            let expected = f64::from(*weight) / total;
            prop_assert!((share - expected).abs() < 0.05, "{share} for {expected}: six standard deviations and more");
            prop_assert!(*weight > 0 || *n == 0);
        }
    }
}

#[test]
fn every_name_counts_towards_the_limit_of_all() {
    let name = |bytes: usize| "x".repeat(bytes);
    let long = TargetSpec {
        model: name(NAME_BYTES_MAX),
        weight: None,
    };
    let model = |bytes: usize| ModelSpec {
        name: name(bytes),
        priority: 0,
        targets: vec![long.clone(); TARGETS_MAX],
    };
    let rule = RewriteSpec {
        models: vec![name(NAME_BYTES_MAX)],
        targets: vec![long.clone(); TARGETS_MAX - 1],
    };
    let objective = |bytes: usize| ObjectiveSpec {
        name: name(bytes),
        priority: 0,
    };
    // Each object has 64 KB, so that 16 objects reach the limit.
    let sized = |models: usize, rewrites: usize, objectives: Vec<ObjectiveSpec>| ObjectsSpec {
        models: vec![model(NAME_BYTES_MAX); models],
        rewrites: vec![rule.clone(); rewrites],
        objectives,
        ..ObjectsSpec::default()
    };
    let names = NAMES_BYTES_MAX / NAME_BYTES_MAX;
    let left = |models: usize, rewrites: usize| {
        names - models * (TARGETS_MAX + 1) - rewrites * TARGETS_MAX
    };
    for (models, rewrites) in [(63, 0), (62, 1), (48, 15), (0, 60)] {
        let mut objectives =
            vec![objective(NAME_BYTES_MAX); left(models, rewrites).min(OBJECTS_MAX)];
        let free = (left(models, rewrites) - objectives.len()) * NAME_BYTES_MAX;
        let full = Objects::build(&sized(models, rewrites, objectives.clone())).map(drop);
        assert_eq!(full, Ok(()), "{models} {rewrites}");
        if free == 0 && objectives.pop().is_some() {
            objectives.extend([objective(NAME_BYTES_MAX - 1), objective(2)]);
            let over = Objects::build(&sized(models, rewrites, objectives)).map(drop);
            assert_eq!(
                over,
                Err(InvalidObjects::TooLong(NAMES_BYTES_MAX + 1)),
                "{models} {rewrites}"
            );
        }
    }
}

#[test]
fn models_are_named_and_nothing_is_empty_but_nothing() {
    let model = ModelSpec {
        name: "m".to_owned(),
        priority: 0,
        targets: vec![],
    };
    let spec = ObjectsSpec {
        models: vec![model],
        ..ObjectsSpec::default()
    };
    let objects = Objects::build(&spec).unwrap();
    assert_eq!((objects.names("m"), objects.names("n")), (true, false));
    assert_eq!(
        (spec.is_empty(), ObjectsSpec::default().is_empty()),
        (false, true)
    );
}

#[test]
fn what_breaks_a_limit_is_refused_by_name() {
    let name = |bytes: usize| "x".repeat(bytes);
    let model = |name: String| ModelSpec {
        name,
        priority: 0,
        targets: vec![],
    };
    let objective = |name: String| ObjectiveSpec { name, priority: 0 };
    let target = |weight| TargetSpec {
        model: "t".to_owned(),
        weight,
    };
    let rule = |models: Vec<String>, targets| RewriteSpec { models, targets };
    let models = |models| ObjectsSpec {
        models,
        ..ObjectsSpec::default()
    };
    let objectives = |objectives| ObjectsSpec {
        objectives,
        ..ObjectsSpec::default()
    };
    let rewrites = |rewrites| ObjectsSpec {
        rewrites,
        ..ObjectsSpec::default()
    };
    let big = |count: usize| {
        rewrites(vec![
            rule(vec![name(NAME_BYTES_MAX); TARGETS_MAX], vec![]);
            count
        ])
    };
    let fitting = NAMES_BYTES_MAX / NAME_BYTES_MAX / TARGETS_MAX;
    for good in [
        models(vec![model(name(NAME_BYTES_MAX)); OBJECTS_MAX]),
        objectives(vec![objective(name(1)); OBJECTS_MAX]),
        rewrites(vec![rule(
            vec![],
            vec![target(Some(TARGET_WEIGHT_MAX)); TARGETS_MAX],
        )]),
        big(fitting),
    ] {
        assert_eq!(Objects::build(&good).map(drop), Ok(()));
    }
    for (bad, expected) in [
        (
            models(vec![model(name(0))]),
            "the name of a model has 0 bytes, 1 to 256 are allowed",
        ),
        (
            models(vec![model(name(257))]),
            "the name of a model has 257 bytes, 1 to 256 are allowed",
        ),
        (
            models(vec![model(name(1)); 1025]),
            "1025 models, at most 1024 are allowed",
        ),
        (
            objectives(vec![objective(name(257))]),
            "the name of an objective has 257 bytes, 1 to 256 are allowed",
        ),
        (
            objectives(vec![objective(name(1)); 1025]),
            "1025 objectives, at most 1024 are allowed",
        ),
        (
            rewrites(vec![rule(vec![], vec![]); 1025]),
            "1025 rewrite rules, at most 1024 are allowed",
        ),
        (
            rewrites(vec![rule(vec![name(1); 65], vec![])]),
            "65 matches of a rule, at most 64 are allowed",
        ),
        (
            rewrites(vec![rule(vec![name(0)], vec![])]),
            "the name of a match has 0 bytes, 1 to 256 are allowed",
        ),
        (
            rewrites(vec![rule(vec![], vec![target(None); 65])]),
            "65 targets, at most 64 are allowed",
        ),
        (
            rewrites(vec![rule(vec![], vec![target(Some(1_000_001))])]),
            "a weight of 1000001, at most 1000000 is allowed",
        ),
        (
            big(fitting + 1),
            "names of 1064960 bytes together, at most 1048576 are allowed",
        ),
    ] {
        assert_eq!(
            Objects::build(&bad)
                .map(drop)
                .map_err(|e: InvalidObjects| e.to_string()),
            Err(expected.to_owned())
        );
    }
}
