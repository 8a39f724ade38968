//! Models, rewrites and objectives of a pool (`--objects`), in the formats of llm-d and the Gateway
//! API Inference Extension.
//!
//! ```yaml
//! apiVersion: llm-d.ai/v1alpha2
//! kind: InferenceObjective
//! metadata: {name: batch}
//! spec: {priority: -1, poolRef: {name: default}}
//! ```
//! `InferenceObjective`, `InferenceModel` and `InferenceModelRewrite` objects, in any number of
//! files and documents, are read as strictly as a configuration. A pool takes the objects whose
//! `poolRef` names its `InferencePool`, or the pool itself if it has no InferencePool. Objects that
//! name no pool of this daemon have no effect; the daemon warns about them.
//!
//! If two objects have the same name, the older one is used. The age is given by
//! `metadata.creationTimestamp`. Objects in files may lack this field. Such objects count as
//! younger than all others, ordered by file name and document.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use discovery::file_watcher::{FileSet, FileSetWatcher};
use discovery::kubernetes::{self, CustomKind, follow_objects};
use futures::stream::{BoxStream, StreamExt};
use scheduler::objects::{ModelSpec, ObjectiveSpec, Objects, ObjectsSpec, RewriteSpec};
use serde_json::Value;

mod reader;

pub use reader::{ObjectKind, read};

/// The source of a pool's objects.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectsSource {
    /// InferenceObjective, InferenceModel and InferenceModelRewrite objects in YAML: all files of a
    /// folder, or one file; read again when they change. Only objects whose poolRef names the pool
    /// apply.
    #[arg(id = "objects", long, env = "SWITCHPOINT_OBJECTS", value_name = "DIR")]
    pub path: Option<PathBuf>,

    /// Read these objects from this namespace of the API server (in-cluster, or of the kubeconfig).
    #[arg(
        id = "objects_kubernetes",
        long,
        env = "SWITCHPOINT_OBJECTS_KUBERNETES",
        value_name = "NAMESPACE",
        conflicts_with = "objects"
    )]
    pub kubernetes: Option<String>,

    /// Answer 404 to a model that neither an object nor an endpoint's metadata names, even if there
    /// is no InferenceModel.
    #[arg(long, env = "SWITCHPOINT_STRICT_MODELS")]
    pub strict_models: bool,
}

/// An object that was read from YAML.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolObject {
    pub name: String,
    /// The namespace of the object, or empty if the object has none.
    pub namespace: String,
    pub pool: String,
    /// The creation time of the object in the format of Kubernetes, if given.
    pub created: Option<String>,
    pub body: ObjectBody,
}

/// The content of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectBody {
    /// `InferenceObjective`
    Objective {
        /// The priority of the objective.
        priority: i32,
    },
    /// `InferenceModel`
    Model(ModelSpec),
    /// `InferenceModelRewrite`
    Rewrite(Vec<RewriteSpec>),
}

/// The name by which objects refer to a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolName {
    /// The name in `poolRef` of the objects.
    pub name: Arc<str>,
    /// The namespace of the objects, which is also that of their pool. `None` means any namespace.
    pub namespace: Option<Arc<str>>,
}

/// Selects the objects of a pool.
#[derive(Clone, Debug)]
pub struct ObjectSelection {
    pub pool: PoolName,
    /// The names of all pools of the daemon.
    pub served: Arc<[PoolName]>,
    /// If true, only models that an object or metadata names are known, even if there is no
    /// InferenceModel.
    pub strict_models: bool,
}

/// The objects of a pool, and counts of other objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolObjects {
    pub spec: ObjectsSpec,
    /// Objects of other pools of this daemon, counted by pool.
    pub elsewhere: BTreeMap<String, usize>,
    /// Objects whose pool this daemon does not serve, counted by the name of that pool.
    pub without_pool: BTreeMap<String, usize>,
    /// Objectives and models that have no effect because an older object has the same name.
    pub shadowed: Vec<String>,
}

/// Follows the objects of a pool.
pub struct ObjectsFile {
    from: ObjectOrigin,
    /// The pool's name in the daemon, for messages.
    pool: Arc<str>,
    selection: ObjectSelection,
    /// The last objects; `None` if the last read failed.
    last_objects: Option<PoolObjects>,
}

enum ObjectOrigin {
    Files(FileSetWatcher),
    /// Custom objects in this namespace of Kubernetes.
    Cluster(String, BoxStream<'static, Result<Vec<Value>, String>>),
}

/// The custom resources in Kubernetes: those of llm-d, and their predecessors in the Gateway API
/// Inference Extension.
const CLUSTER_KINDS: [CustomKind; 5] = [
    custom("llm-d.ai", "InferenceObjective", "inferenceobjectives"),
    custom(
        "llm-d.ai",
        "InferenceModelRewrite",
        "inferencemodelrewrites",
    ),
    custom(
        "inference.networking.x-k8s.io",
        "InferenceObjective",
        "inferenceobjectives",
    ),
    custom(
        "inference.networking.x-k8s.io",
        "InferenceModelRewrite",
        "inferencemodelrewrites",
    ),
    custom(
        "inference.networking.x-k8s.io",
        "InferenceModel",
        "inferencemodels",
    ),
];

const fn custom(group: &'static str, kind: &'static str, plural: &'static str) -> CustomKind {
    CustomKind {
        group,
        version: "v1alpha2",
        kind,
        plural,
    }
}

// === impl PoolObjects ===

impl PoolObjects {
    /// Logs the objects in force and the objects without effect.
    pub fn log(&self, pool: &str) {
        let ObjectsSpec {
            objectives,
            models,
            rewrites,
            strict_models,
        } = &self.spec;
        let objectives = objectives.len();
        let models = models.len();
        let rules = rewrites.len();
        tracing::info!(
            pool,
            objectives,
            models,
            rewrite_rules = rules,
            strict_models,
            "objects in force"
        );
        for (other, count) in &self.elsewhere {
            tracing::info!(
                pool,
                count,
                pool_ref = other,
                "objects that name another pool have no effect here"
            );
        }
        for (other, count) in &self.without_pool {
            tracing::warn!(
                pool,
                count,
                pool_ref = other,
                "objects name a pool that this daemon does not serve; they have no effect"
            );
        }
        for object in &self.shadowed {
            tracing::warn!(
                pool,
                object,
                "an older object has the same name, so this object has no effect"
            );
        }
    }
}

// === impl ObjectsFile ===

impl ObjectsFile {
    /// Follows the objects at `path` for the pool named `pool`.
    #[must_use]
    pub fn new(path: PathBuf, pool: Arc<str>, selection: ObjectSelection) -> Self {
        Self {
            from: ObjectOrigin::Files(FileSetWatcher::new(path)),
            pool,
            selection,
            last_objects: None,
        }
    }

    /// Follows the objects in a namespace of Kubernetes. The cluster need not be reachable.
    ///
    /// # Errors
    /// Fails if the client configuration for Kubernetes is missing.
    pub async fn in_cluster(
        kube_namespace: String,
        pool: Arc<str>,
        selection: ObjectSelection,
    ) -> Result<Self, String> {
        let objects = follow_objects(
            &kubernetes::connect().await?,
            &kube_namespace,
            &CLUSTER_KINDS,
        );
        Ok(Self {
            from: ObjectOrigin::Cluster(kube_namespace, objects),
            pool,
            selection,
            last_objects: None,
        })
    }

    /// Returns a description of the source for messages.
    #[must_use]
    pub fn described(&self) -> String {
        match &self.from {
            ObjectOrigin::Files(follow) => follow.path().display().to_string(),
            ObjectOrigin::Cluster(namespace, _) => format!("Kubernetes namespace {namespace}"),
        }
    }

    /// Waits for new objects; the first call returns the current objects. An error says why the
    /// objects cannot be used. The call is cancel-safe.
    pub async fn changed(&mut self) -> Result<PoolObjects, String> {
        loop {
            let found = self.next().await;
            let objects = found.inspect_err(|_| self.last_objects = None)?;
            // A cluster is listed again every few minutes. Unchanged objects are neither returned
            // nor logged again.
            if self.last_objects.as_ref() != Some(&objects) {
                self.last_objects = Some(objects.clone());
                return Ok(objects);
            }
        }
    }

    async fn next(&mut self) -> Result<PoolObjects, String> {
        match &mut self.from {
            ObjectOrigin::Files(follow) => of_pool(
                &follow.changed().await.map_err(|e| e.to_string())?,
                &self.selection,
            ),
            ObjectOrigin::Cluster(_, changes) => match changes.next().await {
                Some(Ok(all)) => of_cluster(&all, &self.pool, &self.selection),
                Some(Err(why)) => Err(why),
                None => std::future::pending().await,
            },
        }
    }
}

impl fmt::Debug for ObjectsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectsFile")
            .field("from", &self.described())
            .field("pool", &self.pool)
            .finish_non_exhaustive()
    }
}

/// Selects the objects of a pool among all objects in a namespace. Unreadable objects are skipped
/// and logged.
fn of_cluster(
    all: &[Value],
    pool: &str,
    selection: &ObjectSelection,
) -> Result<PoolObjects, String> {
    let mut objects = Vec::new();
    for object in all {
        let (report, read) = read(&object.to_string()); // JSON is YAML
        if report.errors.is_empty() {
            objects.extend(read);
        } else {
            let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
            tracing::warn!(
                pool,
                why = report.complaints(&name),
                "an object cannot be used"
            );
        }
    }
    checked(select(objects, selection), &selection.pool)
}

/// Selects the objects of a pool among the objects in all files.
///
/// # Errors
/// Returns all errors in all files, one line each. One error refuses all files, because an
/// unreadable object may belong to any pool.
pub fn of_pool(files: &FileSet, selection: &ObjectSelection) -> Result<PoolObjects, String> {
    let mut objects = Vec::new();
    let mut complaints = Vec::new();
    let mut taken: BTreeMap<(ObjectKind, String, String), String> = BTreeMap::new();
    for (path, text) in &files.0 {
        let file = path.display().to_string();
        let (report, read) = read(text);
        if !report.errors.is_empty() {
            complaints.push(report.complaints(&file));
        }
        for object in read {
            let key = (
                object.body.kind(),
                object.namespace.clone(),
                object.name.clone(),
            );
            match taken.get(&key) {
                Some(other) if *other != file => {
                    complaints.push(format!("{file}: {} {:?} is in {other} too", key.0, key.2));
                }
                _ => drop(taken.insert(key, file.clone())),
            }
            objects.push(object);
        }
    }
    if !complaints.is_empty() {
        return Err(complaints.join("\n"));
    }
    checked(select(objects, selection), &selection.pool)
}

fn checked(found: PoolObjects, pool: &PoolName) -> Result<PoolObjects, String> {
    match Objects::build(&found.spec) {
        Ok(_) => Ok(found),
        Err(why) => Err(format!("objects of pool {:?}: {why}", pool.name)),
    }
}

/// Selects the objects of a pool, oldest first.
fn select(mut objects: Vec<PoolObject>, selection: &ObjectSelection) -> PoolObjects {
    let ObjectSelection {
        pool,
        served,
        strict_models,
    } = selection;
    // Kubernetes' timestamps sort as text. The sort is stable, so the order of files decides
    // between equal times.
    objects.sort_by_key(|object| (object.created.is_none(), object.created.clone()));
    let mut found = PoolObjects {
        spec: ObjectsSpec {
            strict_models: *strict_models,
            ..ObjectsSpec::default()
        },
        ..PoolObjects::default()
    };
    for object in objects {
        if !pool.is_named_by(&object) {
            let others = if served.iter().any(|other| other.is_named_by(&object)) {
                &mut found.elsewhere
            } else {
                &mut found.without_pool
            };
            *others.entry(object.pool_in_full()).or_default() += 1;
            continue;
        }
        let spec = &mut found.spec;
        match object.body {
            ObjectBody::Objective { .. }
                if spec.objectives.iter().any(|o| o.name == object.name) =>
            {
                found.shadowed.push(format!(
                    "{} {:?}",
                    ObjectKind::InferenceObjective,
                    object.name
                ));
            }
            ObjectBody::Objective { priority } => spec.objectives.push(ObjectiveSpec {
                name: object.name,
                priority,
            }),
            ObjectBody::Model(model) if spec.models.iter().any(|m| m.name == model.name) => {
                found
                    .shadowed
                    .push(format!("{} {:?}", ObjectKind::InferenceModel, object.name));
            }
            ObjectBody::Model(model) => spec.models.push(model),
            ObjectBody::Rewrite(rules) => spec.rewrites.extend(rules),
        }
    }
    found
}

/// Returns whether the text is a file of objects, not a configuration. The first `kind` decides.
#[must_use]
pub fn holds_objects(text: &str) -> bool {
    let kinds = text.lines().filter_map(|line| {
        line.trim_start_matches(['-', ' ', '{', '"'])
            .strip_prefix("kind")
    });
    let first = kinds
        .map(|rest| rest.trim_matches(|c: char| !c.is_ascii_alphanumeric()))
        .next();
    first.is_some_and(|kind| kind == "List" || ObjectKind::nearest(kind).is_some())
}

// === impl PoolName ===

impl PoolName {
    /// Creates the name of a pool for objects in any namespace.
    #[must_use]
    pub fn anywhere(name: &str) -> Self {
        Self {
            name: name.into(),
            namespace: None,
        }
    }

    /// Returns whether the object names this pool. An object in a file needs no namespace.
    fn is_named_by(&self, object: &PoolObject) -> bool {
        let here = self
            .namespace
            .as_deref()
            .is_none_or(|namespace| object.namespace.is_empty() || object.namespace == namespace);
        here && *self.name == object.pool
    }
}

// === impl ObjectSelection ===

impl ObjectSelection {
    /// Creates the selection for the only pool of the daemon.
    #[must_use]
    pub fn for_pool(pool: &str) -> Self {
        let pool = PoolName::anywhere(pool);
        Self {
            served: Arc::from([pool.clone()]),
            pool,
            strict_models: false,
        }
    }
}

// === impl PoolObject ===

impl PoolObject {
    /// Returns the pool that the object names, with the namespace.
    fn pool_in_full(&self) -> String {
        if self.namespace.is_empty() {
            self.pool.clone()
        } else {
            format!("{}/{}", self.namespace, self.pool)
        }
    }
}

// === impl ObjectBody ===

impl ObjectBody {
    #[must_use]
    pub fn kind(&self) -> ObjectKind {
        match self {
            Self::Objective { .. } => ObjectKind::InferenceObjective,
            Self::Model(_) => ObjectKind::InferenceModel,
            Self::Rewrite(_) => ObjectKind::InferenceModelRewrite,
        }
    }
}

#[cfg(test)]
mod tests;
