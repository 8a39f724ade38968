//! Converts a pool's objects from and to messages. [`scheduler::objects::Objects::build`] checks
//! the limits of the objects.

use scheduler::objects::{ModelSpec, ObjectiveSpec, ObjectsSpec, RewriteSpec, TargetSpec};

use crate::state;

pub(crate) fn encode(spec: &ObjectsSpec) -> state::Objects {
    let ObjectsSpec {
        objectives,
        models,
        rewrites,
        strict_models,
    } = spec;
    let objective = |o: &ObjectiveSpec| state::Objective {
        name: o.name.clone(),
        priority: o.priority,
    };
    let model = |m: &ModelSpec| state::Model {
        name: m.name.clone(),
        priority: m.priority,
        targets: encode_targets(&m.targets),
    };
    let rewrite = |r: &RewriteSpec| state::Rewrite {
        models: r.models.clone(),
        targets: encode_targets(&r.targets),
    };
    state::Objects {
        objectives: objectives.iter().map(objective).collect(),
        models: models.iter().map(model).collect(),
        rewrites: rewrites.iter().map(rewrite).collect(),
        strict_models: *strict_models,
    }
}

pub(crate) fn decode(message: state::Objects) -> ObjectsSpec {
    let state::Objects {
        objectives,
        models,
        rewrites,
        strict_models,
    } = message;
    let objective = |o: state::Objective| ObjectiveSpec {
        name: o.name,
        priority: o.priority,
    };
    let model = |m: state::Model| ModelSpec {
        name: m.name,
        priority: m.priority,
        targets: decode_targets(m.targets),
    };
    let rewrite = |r: state::Rewrite| RewriteSpec {
        models: r.models,
        targets: decode_targets(r.targets),
    };
    ObjectsSpec {
        objectives: objectives.into_iter().map(objective).collect(),
        models: models.into_iter().map(model).collect(),
        rewrites: rewrites.into_iter().map(rewrite).collect(),
        strict_models,
    }
}

fn encode_targets(targets: &[TargetSpec]) -> Vec<state::Target> {
    targets
        .iter()
        .map(|t| state::Target {
            model: t.model.clone(),
            weight: t.weight,
        })
        .collect()
}

fn decode_targets(targets: Vec<state::Target>) -> Vec<TargetSpec> {
    targets
        .into_iter()
        .map(|t| TargetSpec {
            model: t.model,
            weight: t.weight,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_arrive_as_they_were() {
        let target = |model: &str, weight| TargetSpec {
            model: model.to_owned(),
            weight,
        };
        let spec = ObjectsSpec {
            objectives: vec![
                ObjectiveSpec {
                    name: "batch".to_owned(),
                    priority: i32::MIN,
                },
                ObjectiveSpec {
                    name: "urgent".to_owned(),
                    priority: i32::MAX,
                },
            ],
            models: vec![ModelSpec {
                name: "chat".to_owned(),
                priority: -1,
                targets: vec![target("a", Some(0)), target("b", None)],
            }],
            rewrites: vec![
                RewriteSpec {
                    models: vec!["x".to_owned(), "y".to_owned()],
                    targets: vec![target("z", Some(1_000_000))],
                },
                RewriteSpec {
                    models: vec![],
                    targets: vec![],
                },
            ],
            strict_models: true,
        };
        assert_eq!(decode(encode(&spec)), spec, "weight 0 differs from none");
        assert_eq!(decode(state::Objects::default()), ObjectsSpec::default());
    }
}
