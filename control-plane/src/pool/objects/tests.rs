use proptest::prelude::*;
use scheduler::objects::TargetSpec;

use super::*;

/// One file with all three kinds, as `kubectl get` prints them and users write them.
const ALL: &str = "\
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch, namespace: ml, labels: {team: a}}
spec:
  priority: -1
  poolRef: {group: inference.networking.k8s.io, kind: InferencePool, name: llama}
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceModel
metadata: {name: chat}
spec:
  modelName: chat
  criticality: Critical
  targetModels:
  - {name: chat-v1, weight: 90}
  - {name: chat-v2, weight: 0}
  poolRef: {name: llama}
---
# nothing here
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: canary}
spec:
  poolRef: {name: llama}
  rules:
  - matches:
    - model: {type: Exact, value: old}
    - model: {value: older}
    targets: [{modelRewrite: new}]
  - targets: [{modelRewrite: a, weight: 1}, {modelRewrite: b, weight: 2}]
";

fn files(texts: &[&str]) -> FileSet {
    FileSet(
        texts
            .iter()
            .enumerate()
            .map(|(i, text)| (format!("{i}.yaml").into(), (*text).to_owned()))
            .collect(),
    )
}

fn target(model: &str, weight: Option<u32>) -> TargetSpec {
    TargetSpec {
        model: model.to_owned(),
        weight,
    }
}

/// Returns an objective as one line of YAML.
fn objective(name: &str, pool: &str, priority: i32, created: &str) -> String {
    let created = if created.is_empty() {
        String::new()
    } else {
        format!(", creationTimestamp: {created}")
    };
    format!(
        "{{apiVersion: llm-d.ai/v1alpha2, kind: InferenceObjective, metadata: {{name: {name}, namespace: n{priority}{created}}}, \
         spec: {{priority: {priority}, poolRef: {{name: {pool}}}}}}}\n"
    )
}

/// Returns all errors of one file, as printed.
fn complaints(text: &str) -> String {
    of_pool(&files(&[text]), &ObjectSelection::for_pool("llama")).expect_err("taken")
}

#[test]
fn every_kind_is_read() {
    let PoolObjects {
        spec,
        elsewhere,
        without_pool,
        shadowed,
    } = of_pool(&files(&[ALL]), &ObjectSelection::for_pool("llama")).unwrap();
    assert_eq!(
        spec.objectives,
        [ObjectiveSpec {
            name: "batch".to_owned(),
            priority: -1
        }]
    );
    let targets = vec![target("chat-v1", Some(90)), target("chat-v2", Some(0))];
    assert_eq!(
        spec.models,
        [ModelSpec {
            name: "chat".to_owned(),
            priority: 1,
            targets
        }]
    );
    let rules = [
        RewriteSpec {
            models: vec!["old".to_owned(), "older".to_owned()],
            targets: vec![target("new", None)],
        },
        RewriteSpec {
            models: vec![],
            targets: vec![target("a", Some(1)), target("b", Some(2))],
        },
    ];
    assert_eq!(spec.rewrites, rules);
    assert!(elsewhere.is_empty() && without_pool.is_empty() && shadowed.is_empty());
}

#[test]
fn an_inference_pool_takes_the_objects_of_its_namespace_that_name_it_and_says_which_name_no_pool() {
    let pool = |namespace: &str, name: &str| PoolName {
        name: name.into(),
        namespace: Some(namespace.into()),
    };
    let selection = |own: PoolName| ObjectSelection {
        served: Arc::from([pool("n1", "llama"), pool("n2", "llama")]),
        pool: own,
        strict_models: false,
    };
    // The namespace of each object is `n` followed by the object's priority. The last object has no
    // namespace, which is allowed in a file.
    let bare = objective("d", "llama", 4, "").replace(", namespace: n4", "");
    let texts = [
        objective("a", "llama", 1, ""),
        objective("b", "llama", 2, ""),
        objective("c", "default", 1, ""),
        bare,
    ];
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for (own, expected, other) in [
        (pool("n1", "llama"), ["a", "d"], "n2/llama"),
        (pool("n2", "llama"), ["b", "d"], "n1/llama"),
    ] {
        let found = of_pool(&files(&texts), &selection(own)).unwrap();
        let names: Vec<&str> = found
            .spec
            .objectives
            .iter()
            .map(|o| o.name.as_str())
            .collect();
        assert_eq!(names, expected);
        assert_eq!(found.elsewhere, BTreeMap::from([(other.to_owned(), 1)]));
        assert_eq!(
            found.without_pool,
            BTreeMap::from([("n1/default".to_owned(), 1)])
        );
    }
}

#[test]
fn a_pool_takes_its_own_and_counts_the_others() {
    let served = Arc::from(["llama", "qwen"].map(PoolName::anywhere));
    let selection = ObjectSelection {
        served,
        strict_models: true,
        ..ObjectSelection::for_pool("qwen")
    };
    let found = of_pool(&files(&[ALL, &objective("x", "qwen", 1, "")]), &selection).unwrap();
    assert_eq!(
        found.spec,
        ObjectsSpec {
            objectives: vec![ObjectiveSpec {
                name: "x".to_owned(),
                priority: 1
            }],
            strict_models: true,
            ..ObjectsSpec::default()
        }
    );
    assert_eq!(
        found.elsewhere,
        BTreeMap::from([("llama".to_owned(), 2), ("ml/llama".to_owned(), 1)])
    );
    assert!(found.without_pool.is_empty());
}

#[test]
fn the_oldest_of_one_name_counts() {
    let first = |texts: &[&str]| {
        let found = of_pool(&files(texts), &ObjectSelection::for_pool("llama")).unwrap();
        assert_eq!((found.spec.objectives.len(), found.shadowed.len()), (1, 1));
        found.spec.objectives[0].priority
    };
    let plain = objective("a", "llama", 1, "");
    let other = objective("a", "llama", 2, "");
    let old = objective("a", "llama", 3, "2025-01-01T00:00:00Z");
    let new = objective("a", "llama", 4, "2025-01-01T00:00:01Z");
    assert_eq!(first(&[&plain, &other]), 1, "by file");
    assert_eq!(first(&[&format!("{other}---\n{plain}")]), 2, "by document");
    assert_eq!(first(&[&new, &old]), 3, "by time, where it is given");
    assert_eq!(
        first(&[&plain, &new]),
        4,
        "an object with a time is older than one without"
    );
}

#[test]
fn what_kubectl_prints_is_read() {
    let items = objective("a", "llama", 1, "2025-01-01T00:00:00Z").replace(
        "metadata: {",
        "status: {conditions: []}, metadata: {uid: x, generation: 1, ",
    );
    let list =
        format!("apiVersion: v1\nkind: List\nmetadata: {{resourceVersion: ''}}\nitems:\n- {items}");
    assert_eq!(
        of_pool(&files(&[&list]), &ObjectSelection::for_pool("llama"))
            .unwrap()
            .spec
            .objectives
            .len(),
        1
    );
    let said = complaints(&list.replace("priority: 1", "priority: x"));
    assert!(
        said.starts_with("0.yaml:5: items[0].spec.priority: must be a whole number"),
        "{said}"
    );
}

#[test]
fn mistakes_are_named_with_line_path_and_what_was_meant() {
    for (from, to, expected) in [
        (
            "kind: InferenceObjective",
            "kind: InferenceObjektive",
            "0.yaml:2: [0].kind: unknown kind \"InferenceObjektive\"; did you mean \"InferenceObjective\"?",
        ),
        (
            "llm-d.ai/v1alpha2\nkind: InferenceObjective",
            "lmm-d.ai/v1\nkind: InferenceObjective",
            "0.yaml:1: [0].apiVersion: unknown group \"lmm-d.ai\"; did you mean \"llm-d.ai\"?",
        ),
        (
            "llm-d.ai/v1alpha2\nkind: InferenceObjective",
            "llm-d.ai/alpha\nkind: InferenceObjective",
            "0.yaml:1: [0].apiVersion: \"alpha\" is not a version",
        ),
        (
            "priority: -1",
            "priorty: -1",
            "0.yaml:5: [0].spec.priorty: unknown field \"priorty\"; did you mean \"priority\"?",
        ),
        (
            "priority: -1",
            "priority: -1.5",
            "0.yaml:5: [0].spec.priority: must be a whole number from -2147483648 to 2147483647",
        ),
        (
            "priority: -1",
            "priority: high",
            "0.yaml:5: [0].spec.priority: must be a whole number",
        ),
        (
            "priority: -1",
            "priority: 2147483648",
            "0.yaml:5: [0].spec.priority: must be a whole number",
        ),
        (
            "priority: -1",
            "priority: .nan",
            "0.yaml:5: [0].spec.priority: must be a whole number",
        ),
        (
            "  poolRef: {group: inference.networking.k8s.io, kind: InferencePool, name: llama}",
            "",
            "0.yaml:5: [0].spec: has no poolRef",
        ),
        (
            "kind: InferencePool,",
            "kind: Service,",
            "0.yaml:6: [0].spec.poolRef.kind: unknown kind \"Service\"; known are InferencePool",
        ),
        (
            "name: batch, namespace",
            "namespace",
            "0.yaml:3: [0].metadata: has no name",
        ),
        (
            "labels: {team: a}",
            "creationTimestamp: yesterday",
            "0.yaml:3: [0].metadata.creationTimestamp: \"yesterday\" is not a time",
        ),
        (
            "modelName: chat",
            "modelName: ''",
            "0.yaml:12: [1].spec.modelName: has 0 bytes",
        ),
        (
            "Critical\n",
            "Crytical\n",
            "0.yaml:13: [1].spec.criticality: unknown criticality \"Crytical\"; did you mean \"Critical\"?",
        ),
        (
            "weight: 90",
            "weight: -1",
            "0.yaml:15: [1].spec.targetModels[0].weight: must be a whole number from 0 to 1000000",
        ),
        (
            "name: chat-v1, ",
            "",
            "0.yaml:15: [1].spec.targetModels[0]: has no name",
        ),
        (
            "type: Exact",
            "type: Prefix",
            "0.yaml:28: [2].spec.rules[0].matches[0].model.type: unknown type \"Prefix\"; known are Exact",
        ),
        (
            "model: {value: older}",
            "modle: {value: older}",
            "0.yaml:29: [2].spec.rules[0].matches[1].modle: unknown field",
        ),
        (
            "b, weight: 2",
            "b, weight: 0",
            "0.yaml:31: [2].spec.rules[1].targets[1].weight: must be a whole number from 1 to 1000000",
        ),
        ("rules:\n", "rules: {}\n", "0.yaml:"),
        (
            "kind: InferenceModel\n",
            "kind: [InferenceModel]\n",
            "0.yaml:9: [1].kind: must be text, not a list",
        ),
        (
            "metadata: {name: chat}",
            "metadata: chat",
            "0.yaml:10: [1].metadata: must be a map, not text",
        ),
    ] {
        assert!(ALL.contains(from), "{from}");
        let said = complaints(&ALL.replacen(from, to, 1));
        assert!(
            said.lines().any(|line| line.starts_with(expected)),
            "{to}: no {expected} in\n{said}"
        );
    }
    assert!(complaints(": [").starts_with("0.yaml:"), "no YAML");
    assert!(complaints("just text").contains("must be a map, not text"));
}

#[test]
fn nothing_is_taken_of_files_of_which_one_is_wrong() {
    let said = of_pool(
        &files(&[
            ALL,
            "kind: InferenceObjective\n",
            &objective("x", "qwen", 1, "").replace("pool", "poll"),
        ]),
        &ObjectSelection::for_pool("llama"),
    )
    .unwrap_err();
    assert!(
        said.contains("1.yaml:1: has no apiVersion")
            && said.contains("2.yaml:1: spec: has no poolRef"),
        "{said}"
    );
}

#[test]
fn an_object_is_there_once() {
    let twice = of_pool(&files(&[ALL, ALL]), &ObjectSelection::for_pool("llama")).unwrap_err();
    assert!(
        twice.contains("1.yaml: InferenceModelRewrite \"canary\" is in 0.yaml too"),
        "{twice}"
    );
    let said = complaints(&format!("{ALL}---\n{ALL}"));
    assert!(
        said.contains("[3]: there is an InferenceObjective \"batch\" already (line 1)"),
        "{said}"
    );
}

#[test]
fn limits_of_a_pool_are_those_of_the_scheduler() {
    let many: Vec<String> = (0..1025)
        .map(|i| objective(&format!("o{i}"), "llama", 0, ""))
        .collect();
    let (a, b) = many.split_at(600);
    let said = of_pool(
        &files(&[&a.join("---\n"), &b.join("---\n")]),
        &ObjectSelection::for_pool("llama"),
    )
    .unwrap_err();
    assert_eq!(
        said,
        "objects of pool \"llama\": 1025 objectives, at most 1024 are allowed"
    );
    let targets = vec!["{modelRewrite: x}"; 65].join(", ");
    let said = complaints(&ALL.replace("[{modelRewrite: new}]", &format!("[{targets}]")));
    assert!(
        said.contains("[2].spec.rules[0].targets: has 65, at most 64 are allowed"),
        "{said}"
    );
}

#[test]
fn each_object_is_described_in_one_line() {
    let items = read(&ALL.replace(", weight: 2", "")).0.items;
    let said: Vec<String> = items
        .iter()
        .map(|item| format!("{} {}", item.path, item.reason))
        .collect();
    assert_eq!(
        said,
        [
            "[0] InferenceObjective \"batch\" of pool \"llama\": priority -1",
            "[1] InferenceModel \"chat\" of pool \"llama\": model \"chat\", priority 1, targets chat-v1 (90), chat-v2 (0)",
            "[2].spec.rules[1].targets 1 of 2 targets have no weight beside weighted ones: they are never picked",
            "[2] InferenceModelRewrite \"canary\" of pool \"llama\": old or older becomes new; any model becomes a (1), b",
        ]
    );
}

#[test]
fn a_file_of_objects_is_distinguished_from_a_configuration() {
    for (text, objects) in [
        (ALL, true),
        ("kind: List\n", true),
        (
            "{\"apiVersion\": \"v1\",\n \"kind\": \"InferenceModel\"}",
            true,
        ),
        (
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n",
            false,
        ),
        ("kind: InferenceObjectiv\n", true),
        ("kind: Pod\n", false),
        ("plugins: []\n", false),
        ("", false),
    ] {
        assert_eq!(holds_objects(text), objects, "{text}");
    }
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}", at: prop::sample::Index, cut: prop::sample::Index) {
        let _ = read(&text);
        let _ = holds_objects(&text);
        let mut nearly = ALL.to_owned();
        let at = at.index(nearly.len());
        nearly.insert_str(at, text.get(..1).unwrap_or("{"));
        let _ = of_pool(&files(&[&nearly]), &ObjectSelection::for_pool("llama"));
        let _ = of_pool(&files(&[&ALL[..cut.index(ALL.len())]]), &ObjectSelection::for_pool("llama"));
    }
}
