//! The configuration for the requests of one pool: objectives, models and model rewrites.
//!
//! The configuration is compiled once into three small tables, which every request reads. The
//! tables map the name of an objective to its priority, the name of a model to its targets, and the
//! match of a rewrite to its targets. The tables come from `InferenceObjective`, `InferenceModel`
//! and `InferenceModelRewrite` objects. The code that reads these objects sorts them oldest first,
//! because the older of two conflicting objects is used.
//!
//! Rules do not chain. The engine gets the target model, even if another object would rewrite that
//! model too.

use crate::sort::sort_by;
use std::fmt;

use crate::rng::Rng;

/// The maximum number of objectives, models or rewrite rules of one pool. The limit is the same as
/// for endpoints, because every worker keeps the tables.
pub const OBJECTS_MAX: usize = 1024;

/// The maximum number of matches or targets of one model or rule. The CRD allows ten targets.
pub const TARGETS_MAX: usize = 64;

/// The longest name, in bytes. Object names have at most 253; model names can be paths.
pub const NAME_BYTES_MAX: usize = 256;

/// The maximum number of bytes of all names of one pool together. This is a quarter of the largest
/// message, because the message also carries the endpoints.
pub const NAMES_BYTES_MAX: usize = 1 << 20;

/// The largest weight of a target, as in the CRD. The sum of [`TARGETS_MAX`] weights fits into 32
/// bits.
pub const TARGET_WEIGHT_MAX: u32 = 1_000_000;

/// The objects of a pool as their authors wrote them, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectsSpec {
    pub objectives: Vec<ObjectiveSpec>,
    /// Models of the pool. If the list is not empty, every other model is unknown.
    pub models: Vec<ModelSpec>,
    /// The rules of all rewrites. The rules of older objects come first, and the rules of one
    /// object are in its order.
    pub rewrites: Vec<RewriteSpec>,
    /// Whether a model is unknown unless an object or an endpoint's metadata names it, even if the
    /// pool has no [`ModelSpec`].
    pub strict_models: bool,
}

/// An `InferenceObjective`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectiveSpec {
    pub name: String,
    /// The priority of the objective's requests: a higher number is more important, and a request
    /// with a priority below 0 may be shed.
    pub priority: i32,
}

/// An `InferenceModel`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// The model name in requests.
    pub name: String,
    /// Priority of the model's requests; see [`Criticality::priority`].
    pub priority: i32,
    /// The models that the engine may get instead. If the list is empty, the engine gets the model
    /// itself.
    pub targets: Vec<TargetSpec>,
}

/// A rule of an `InferenceModelRewrite`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewriteSpec {
    /// The models that the rule matches. An empty list matches all models.
    pub models: Vec<String>,
    /// The models that the engine may get instead. If the list is empty, the engine gets the model
    /// itself.
    pub targets: Vec<TargetSpec>,
}

/// One of the models that replace the model of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// The model name at the engine.
    pub model: String,
    /// The share of the requests that this target gets, as a weight from 0 to
    /// [`TARGET_WEIGHT_MAX`]. If no target has a weight, all targets get equally many requests.
    /// Otherwise targets without a weight get none.
    pub weight: Option<u32>,
}

/// The criticality of an `InferenceModel`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Criticality {
    /// Requests for the model are never shed.
    Critical,
    /// The default criticality.
    Standard,
    /// Requests for the model may be shed.
    Sheddable,
}

/// The objects of a pool, compiled.
#[derive(Debug, Default)]
pub struct Objects {
    /// The priority of each objective, by name.
    objectives: Box<[(Box<str>, i32)]>,
    /// The models of the pool, by name.
    models: Box<[(Box<str>, ServedModel)]>,
    /// The rewrite for each model that a rule names, as a position in `rules`.
    exact: Box<[(Box<str>, usize)]>,
    /// The rule for all other models, as a position in `rules`.
    generic: Option<usize>,
    rules: Box<[WeightedTargets]>,
    /// The targets of all models and rules, by name. The numbers have no meaning.
    targets: Box<[(Box<str>, usize)]>,
    strict_models: bool,
    /// The highest priority that a request can have.
    highest_priority: i32,
}

#[derive(Debug)]
struct ServedModel {
    priority: i32,
    targets: WeightedTargets,
}

/// The targets of a model or rule, each with the sum of the weights up to and including the
/// target's weight.
#[derive(Debug)]
struct WeightedTargets(Box<[(Box<str>, u32)]>);

/// The model and the objective of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct ModelRequest<'a> {
    /// The model in the request's body. The name is empty if the body is opaque, and then no rule
    /// for models applies.
    pub model: &'a str,
    /// The name of the request's objective.
    pub objective: Option<&'a str>,
    /// The target model that a header of the request names. This target model is used unless an
    /// object sets another target.
    pub rewrite: Option<&'a str>,
}

/// The result of [`Objects::resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedModel<'a> {
    /// The model that the engine gets. `None` means the model in the body.
    pub target_model: Option<&'a str>,
    /// The priority of the request: a higher number is more important, and a request with a
    /// priority below 0 may be shed.
    pub priority: i32,
}

/// The error for a request that names a model that this pool does not serve. A retry without a
/// change fails again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownModel<'a>(pub &'a str);

/// The reason why objects were refused as a whole. The same objects are refused again until the
/// sender changes them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidObjects {
    /// There are too many objects, rules, matches or targets.
    TooMany {
        /// The kind that is over its limit, such as `objectives`.
        what: &'static str,
        count: usize,
        max: usize,
    },
    /// A name is empty or longer than [`NAME_BYTES_MAX`].
    Name {
        what: &'static str,
        /// The length of the name, in bytes.
        bytes: usize,
    },
    /// All names together are longer than [`NAMES_BYTES_MAX`].
    TooLong(usize),
    /// A weight is above [`TARGET_WEIGHT_MAX`].
    Weight(u32),
}

// === impl Criticality ===

impl Criticality {
    /// Returns the priority: 1 for Critical, 0 for Standard, -1 for Sheddable.
    #[must_use]
    pub fn priority(self) -> i32 {
        match self {
            Self::Critical => 1,
            Self::Standard => 0,
            Self::Sheddable => -1,
        }
    }
}

// === impl Objects ===

impl Objects {
    /// Checks and compiles the objects. If two objectives or models have the same name, the first
    /// object is used.
    ///
    /// # Errors
    /// Returns [`InvalidObjects`], which names the limit that is exceeded.
    pub fn build(spec: &ObjectsSpec) -> Result<Self, InvalidObjects> {
        let ObjectsSpec {
            objectives,
            models,
            rewrites,
            strict_models,
        } = spec;
        spec.check()?;
        let mut exact = Vec::new();
        for (position, rule) in rewrites.iter().enumerate() {
            exact.extend(
                rule.models
                    .iter()
                    .map(|model| (model.as_str().into(), position)),
            );
        }
        let mut targets = Vec::new();
        for model in models.iter().filter(|model| model.targets.is_empty()) {
            targets.push((model.name.as_str().into(), 0)); // the model is its own target
        }
        for all in models
            .iter()
            .map(|model| &model.targets)
            .chain(rewrites.iter().map(|rule| &rule.targets))
        {
            targets.extend(all.iter().map(|target| (target.model.as_str().into(), 0)));
        }
        Ok(Self {
            targets: table(targets),
            objectives: table(
                objectives
                    .iter()
                    .map(|o| (o.name.as_str().into(), o.priority)),
            ),
            models: table(models.iter().map(|m| {
                let model = ServedModel {
                    priority: m.priority,
                    targets: WeightedTargets::new(&m.targets),
                };
                (m.name.as_str().into(), model)
            })),
            exact: table(exact),
            generic: rewrites.iter().position(|rule| rule.models.is_empty()),
            rules: rewrites
                .iter()
                .map(|rule| WeightedTargets::new(&rule.targets))
                .collect(),
            strict_models: *strict_models,
            highest_priority: objectives
                .iter()
                .map(|objective| objective.priority)
                .chain(models.iter().map(|model| model.priority))
                .fold(0, i32::max),
        })
    }

    /// Returns the model for the engine and the priority of the request. `is_served` says whether
    /// the metadata of an endpoint names a model.
    ///
    /// The targets of an `InferenceModel` have precedence over rewrites, because these targets are
    /// about this model in this pool. Next comes the oldest rewrite that names the model, and then
    /// the oldest rewrite for all models. Last comes the rewrite in the request itself. An
    /// objective of this pool has precedence over the model's criticality.
    ///
    /// # Errors
    /// Returns [`UnknownModel`] if the request's model (or the model in `rewrite`) is unknown: see
    /// [`ObjectsSpec::models`] and [`ObjectsSpec::strict_models`]. Returns the same error if all
    /// targets of the model have weight 0.
    pub fn resolve<'a>(
        &'a self,
        asked: ModelRequest<'a>,
        is_served: impl Fn(&str) -> bool,
        rng: &mut Rng,
    ) -> Result<ResolvedModel<'a>, UnknownModel<'a>> {
        let objective = asked
            .objective
            .and_then(|name| find(&self.objectives, name))
            .copied();
        if asked.model.is_empty() {
            return Ok(ResolvedModel {
                target_model: None,
                priority: objective.unwrap_or(0),
            });
        }
        self.known(asked.model, &is_served)?;
        let model = find(&self.models, asked.model);
        let mut priority = model.map_or(0, |m| m.priority);
        let target_model = match model
            .map(|m| &m.targets)
            .filter(|t| !t.is_empty())
            .or_else(|| self.rule(asked.model))
        {
            Some(targets) if targets.is_empty() => None,
            Some(targets) => Some(targets.choose(rng).ok_or(UnknownModel(asked.model))?),
            None => {
                // The model in a rewrite header is checked like the model in the body, because a
                // header must not give access to a model that the body could not name.
                if let Some(rewrite) = asked.rewrite {
                    self.known(rewrite, &is_served)?;
                    priority = priority.min(find(&self.models, rewrite).map_or(0, |m| m.priority));
                }
                asked.rewrite
            }
        };
        Ok(ResolvedModel {
            target_model: target_model.filter(|target| *target != asked.model),
            priority: objective.unwrap_or(priority),
        })
    }

    pub fn highest_priority(&self) -> i32 {
        self.highest_priority
    }

    /// Whether an `InferenceModel` of the pool names this model.
    pub fn names(&self, model: &str) -> bool {
        find(&self.models, model).is_some()
    }

    /// Whether an object sends requests to this model. An `InferenceModel` without targets sends
    /// requests to the model that it names.
    pub fn targets(&self, model: &str) -> bool {
        find(&self.targets, model).is_some()
    }

    fn known<'a>(
        &self,
        model: &'a str,
        is_served: &dyn Fn(&str) -> bool,
    ) -> Result<(), UnknownModel<'a>> {
        let known = match self.models.is_empty() {
            false => find(&self.models, model).is_some(),
            true => !self.strict_models || find(&self.exact, model).is_some() || is_served(model),
        };
        if known {
            Ok(())
        } else {
            Err(UnknownModel(model))
        }
    }

    fn rule(&self, model: &str) -> Option<&WeightedTargets> {
        self.rules
            .get(find(&self.exact, model).copied().or(self.generic)?)
    }
}

/// Sorts rows by name. If names are equal, the first row is kept.
fn table<V>(rows: impl IntoIterator<Item = (Box<str>, V)>) -> Box<[(Box<str>, V)]> {
    let mut rows: Vec<(usize, Box<str>, V)> = rows
        .into_iter()
        .enumerate()
        .map(|(at, (name, value))| (at, name, value))
        .collect();
    sort_by(&mut rows, |(i, a, _), (j, b, _)| (a, i) < (b, j));
    rows.dedup_by(|(_, later, _), (_, first, _)| later == first);
    rows.into_iter()
        .map(|(_, name, value)| (name, value))
        .collect()
}

fn find<'t, V>(table: &'t [(Box<str>, V)], name: &str) -> Option<&'t V> {
    let position = table.binary_search_by(|(key, _)| (**key).cmp(name)).ok()?;
    table.get(position).map(|(_, value)| value)
}

// === impl WeightedTargets ===

impl WeightedTargets {
    fn new(targets: &[TargetSpec]) -> Self {
        let weighted = targets.iter().any(|t| t.weight.is_some());
        let mut sum = 0_u32;
        let row = |target: &TargetSpec| {
            sum = sum.saturating_add(target.weight.unwrap_or(u32::from(!weighted)));
            (target.model.as_str().into(), sum)
        };
        Self(targets.iter().map(row).collect())
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Chooses one target by weight; `None` if no weight is above 0.
    fn choose(&self, rng: &mut Rng) -> Option<&str> {
        let total = self.0.last().map_or(0, |(_, sum)| *sum);
        let drawn = u32::try_from(rng.below(usize::try_from(total).ok()?)).ok()?;
        self.0
            .iter()
            .find(|(_, sum)| drawn < *sum)
            .map(|(model, _)| &**model)
    }
}

// === impl ObjectsSpec ===

impl ObjectsSpec {
    /// Whether the pool has no objects, so that every request passes unchanged.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn check(&self) -> Result<(), InvalidObjects> {
        at_most("objectives", self.objectives.len(), OBJECTS_MAX)?;
        at_most("models", self.models.len(), OBJECTS_MAX)?;
        at_most("rewrite rules", self.rewrites.len(), OBJECTS_MAX)?;
        let mut bytes = 0;
        for objective in &self.objectives {
            bytes += name("an objective", &objective.name)?;
        }
        for model in &self.models {
            bytes += name("a model", &model.name)? + targets(&model.targets)?;
        }
        for rule in &self.rewrites {
            at_most("matches of a rule", rule.models.len(), TARGETS_MAX)?;
            for model in &rule.models {
                bytes += name("a match", model)?;
            }
            bytes += targets(&rule.targets)?;
        }
        if bytes > NAMES_BYTES_MAX {
            Err(InvalidObjects::TooLong(bytes))
        } else {
            Ok(())
        }
    }
}

fn at_most(what: &'static str, count: usize, max: usize) -> Result<(), InvalidObjects> {
    if count > max {
        Err(InvalidObjects::TooMany { what, count, max })
    } else {
        Ok(())
    }
}

fn name(what: &'static str, name: &str) -> Result<usize, InvalidObjects> {
    let bytes = name.len();
    if (1..=NAME_BYTES_MAX).contains(&bytes) {
        Ok(bytes)
    } else {
        Err(InvalidObjects::Name { what, bytes })
    }
}

fn targets(targets: &[TargetSpec]) -> Result<usize, InvalidObjects> {
    at_most("targets", targets.len(), TARGETS_MAX)?;
    let mut bytes = 0;
    for target in targets {
        bytes += name("a target", &target.model)?;
        if let Some(weight) = target.weight.filter(|&weight| weight > TARGET_WEIGHT_MAX) {
            return Err(InvalidObjects::Weight(weight));
        }
    }
    Ok(bytes)
}

// === impl InvalidObjects ===

impl fmt::Display for InvalidObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany { what, count, max } => {
                write!(f, "{count} {what}, at most {max} are allowed")
            }
            Self::Name { what, bytes } => write!(
                f,
                "the name of {what} has {bytes} bytes, 1 to {NAME_BYTES_MAX} are allowed"
            ),
            Self::TooLong(bytes) => write!(
                f,
                "names of {bytes} bytes together, at most {NAMES_BYTES_MAX} are allowed"
            ),
            Self::Weight(weight) => write!(
                f,
                "a weight of {weight}, at most {TARGET_WEIGHT_MAX} is allowed"
            ),
        }
    }
}

impl std::error::Error for InvalidObjects {}
