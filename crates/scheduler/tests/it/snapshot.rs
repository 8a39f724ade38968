//! Which snapshots are accepted or refused, and how they are updated.

use std::sync::Arc;

use scheduler::latency::LatencyModel;
use scheduler::latency::step::StepModel;
use scheduler::objects::{ModelSpec, Objects, ObjectsSpec, RewriteSpec, TargetSpec};
use scheduler::{
    ENDPOINTS_MAX, Endpoint, EndpointIndex, EndpointMetrics, EndpointRef, Generation,
    InvalidSnapshot, LoraMetrics, Pipeline, PipelineSpec, Slot, Snapshot, Version,
};

use crate::case::EndpointCase;

fn pool(size: usize) -> Vec<Endpoint> {
    let mut pool: Vec<Endpoint> = (0..size)
        .map(|at| EndpointCase::new(at, &format!("pod-{at}")).endpoint)
        .collect();
    pool.iter_mut().enumerate().for_each(|(at, endpoint)| {
        endpoint.address = format!("10.{}.{}.1:8000", at / 200, at % 200).into();
    });
    pool
}

fn seal(endpoints: Vec<Endpoint>) -> Result<Snapshot, InvalidSnapshot> {
    let metrics = vec![EndpointMetrics::default(); endpoints.len()];
    Snapshot::try_new(
        Version {
            term: 3,
            sequence: 7,
        },
        endpoints,
        metrics,
        Pipeline::build(&PipelineSpec::default()).unwrap(),
    )
}

fn queue_depths(snapshot: &Snapshot) -> Vec<Option<f32>> {
    snapshot
        .metrics()
        .iter()
        .map(|metrics| metrics.queue_depth)
        .collect()
}

#[test]
fn as_many_endpoints_as_there_are_slots() {
    let full = seal(pool(ENDPOINTS_MAX)).unwrap();
    assert_eq!(full.indices().count(), ENDPOINTS_MAX);
    assert_eq!(
        full.version(),
        Version {
            term: 3,
            sequence: 7
        }
    );
    let error = seal(pool(ENDPOINTS_MAX + 1)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "1025 endpoints, at most 1024 are allowed"
    );
}

#[test]
fn models_and_objects_are_kept() {
    let endpoint = pool(1)[0].id;
    let step =
        StepModel::from_parts([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 7.0).with_speed(endpoint, 2.0, 3.0);
    let model = ModelSpec {
        name: "m".to_owned(),
        priority: 0,
        targets: vec![],
    };
    let objects = Objects::build(&ObjectsSpec {
        models: vec![model],
        ..ObjectsSpec::default()
    })
    .unwrap();
    let snapshot = seal(pool(1))
        .unwrap()
        .with_step(Arc::new(step.clone()))
        .with_objects(objects);
    assert_eq!(snapshot.step().words(), step.words());
    assert!(snapshot.objects().names("m"));
    let snapshot = snapshot.with_latency(Some(Arc::new(LatencyModel::constant(1.0, 1.0))));
    let other = snapshot
        .with_endpoints(
            snapshot.version(),
            pool(2),
            vec![EndpointMetrics::default(); 2],
        )
        .unwrap();
    assert_eq!(
        (
            other.step().words(),
            other.objects().names("m"),
            other.latency().is_some()
        ),
        (step.words(), true, true)
    );
    let alike = snapshot.step().without_speeds();
    assert_eq!(
        (alike.prefill(), alike.speed(endpoint), step.speed(endpoint)),
        (step.prefill(), (1.0, 1.0), (2.0, 3.0))
    );
}

#[test]
fn a_metrics_column_of_another_length_is_refused() {
    let pipeline = || Pipeline::build(&PipelineSpec::default()).unwrap();
    let error = Snapshot::try_new(
        Version::default(),
        pool(2),
        vec![EndpointMetrics::default()],
        pipeline(),
    )
    .unwrap_err();
    assert_eq!(error, InvalidSnapshot::MetricsLength(1));
    assert_eq!(
        error.to_string(),
        "1 rows of metrics, one for each endpoint is needed"
    );
    let snapshot = seal(pool(2)).unwrap();
    assert_eq!(
        snapshot
            .with_metrics(Version::default(), Vec::new())
            .unwrap_err(),
        InvalidSnapshot::MetricsLength(0)
    );
}

#[test]
fn slots_and_addresses_are_claimed_once() {
    let mut endpoints = pool(3);
    endpoints[2].id.slot = Slot(0);
    assert_eq!(
        seal(endpoints).unwrap_err().to_string(),
        "slot 0 is claimed by two endpoints"
    );
    let mut endpoints = pool(3);
    endpoints[0].address = endpoints[2].address.clone();
    assert_eq!(
        seal(endpoints).unwrap_err().to_string(),
        "address `10.0.2.1:8000` is claimed by two endpoints"
    );
    let mut endpoints = pool(1);
    endpoints[0].id.slot = Slot(1024);
    assert_eq!(
        seal(endpoints).unwrap_err().to_string(),
        "slot 1024 is out of range, slots are below 1024"
    );
}

#[test]
fn newer_metrics_leave_the_rest_as_it_was() {
    let old = seal(pool(2)).unwrap();
    let metrics = vec![
        EndpointMetrics {
            queue_depth: Some(4.0),
            ..EndpointMetrics::default()
        };
        2
    ];
    let new = old
        .with_metrics(
            Version {
                term: 3,
                sequence: 8,
            },
            metrics,
        )
        .unwrap();
    assert_eq!(
        new.version(),
        Version {
            term: 3,
            sequence: 8
        }
    );
    assert_eq!(new.endpoints(), old.endpoints());
    assert_eq!(
        (queue_depths(&old), queue_depths(&new)),
        (vec![None; 2], vec![Some(4.0); 2])
    );
    assert_eq!(
        new.indices()
            .map(|index| new.socket(index))
            .collect::<Vec<_>>(),
        old.indices()
            .map(|index| old.socket(index))
            .collect::<Vec<_>>()
    );
}

#[test]
fn an_observation_changes_the_row_of_its_endpoint_and_generation() {
    let mut snapshot = seal(pool(3)).unwrap();
    let second = snapshot.endpoints()[1].id;
    snapshot.observe(second, |metrics| metrics.queue_depth = Some(2.0));
    assert_eq!(queue_depths(&snapshot), [None, Some(2.0), None]);
    let former_life = EndpointRef {
        generation: Generation(99),
        ..second
    };
    snapshot.observe(former_life, |metrics| metrics.queue_depth = Some(9.0));
    assert_eq!(queue_depths(&snapshot), [None, Some(2.0), None]);
}

#[test]
fn an_address_that_is_none_has_no_socket() {
    let mut endpoints = pool(2);
    endpoints[1].address = "pod-1.example:8000".into();
    let snapshot = seal(endpoints).unwrap();
    let sockets: Vec<_> = snapshot
        .indices()
        .map(|index| snapshot.socket(index))
        .collect();
    assert_eq!(sockets, ["10.0.0.1:8000".parse().ok(), None]);
}

/// Returns a snapshot of endpoints whose metadata names the base model. The metadata of the last
/// endpoint names another model.
fn of_one_base(model: ModelSpec) -> Snapshot {
    let mut endpoints = pool(3);
    for (endpoint, named) in endpoints.iter_mut().zip(["base", "base", "other"]) {
        endpoint.models = [named.into()].into();
    }
    let objects = Objects::build(&ObjectsSpec {
        models: vec![model],
        ..ObjectsSpec::default()
    })
    .unwrap();
    seal(endpoints).unwrap().with_objects(objects)
}

#[test]
fn an_adapter_that_an_object_targets_is_served_wherever_no_metadata_names_it() {
    let target = |model: &str| TargetSpec {
        model: model.to_owned(),
        weight: None,
    };
    let snapshot = of_one_base(ModelSpec {
        name: "product".into(),
        priority: 0,
        targets: vec![target("adapter"), target("other")],
    });
    let serving = |model: &str| {
        snapshot
            .indices()
            .filter(|&index| snapshot.serves_anywhere(model) || snapshot.serves(index, model))
            .map(EndpointIndex::get)
            .collect::<Vec<_>>()
    };
    assert_eq!(serving("base"), [0, 1]);
    assert_eq!(serving("adapter"), [0, 1, 2]);
    assert_eq!(
        serving("other"),
        [2],
        "metadata that names the model is more exact than the target"
    );
    assert_eq!(
        serving("product"),
        [0; 0],
        "an object's own name is none that an engine knows"
    );
    assert_eq!(serving("unheard"), [0; 0]);
}

#[test]
fn a_model_without_targets_and_the_target_of_a_rewrite_are_served_wherever_no_metadata_names_them()
{
    let model = |name: &str| ModelSpec {
        name: name.to_owned(),
        priority: 0,
        targets: vec![],
    };
    let target = TargetSpec {
        model: "rewritten".to_owned(),
        weight: None,
    };
    let rewrites = vec![RewriteSpec {
        models: vec![],
        targets: vec![target],
    }];
    let spec = ObjectsSpec {
        models: vec![model("adapter"), model("base")],
        rewrites,
        ..ObjectsSpec::default()
    };
    let snapshot = of_one_base(model("unused")).with_objects(Objects::build(&spec).unwrap());
    let anywhere =
        ["adapter", "rewritten", "base", "unheard"].map(|name| snapshot.serves_anywhere(name));
    assert_eq!(
        anywhere,
        [true, true, false, false],
        "metadata names the base model"
    );
}

#[test]
fn an_adapter_that_an_engine_reports_is_served_there() {
    let snapshot = of_one_base(ModelSpec {
        name: "base".into(),
        priority: 0,
        targets: vec![],
    });
    let mut metrics = vec![EndpointMetrics::default(); 3];
    metrics[0].lora = Some(LoraMetrics {
        running: ["running".into()].into(),
        waiting: ["waiting".into()].into(),
        max: 2,
        base_models: [].into(),
    });
    let snapshot = snapshot.with_metrics(snapshot.version(), metrics).unwrap();
    let serving = |model: &str| {
        snapshot
            .indices()
            .filter(|&index| snapshot.serves_anywhere(model) || snapshot.serves(index, model))
            .count()
    };
    assert_eq!(
        (serving("running"), serving("waiting"), serving("absent")),
        (1, 1, 0)
    );
}
