//! What is configured about requests rather than endpoints: objectives, models and rewrites of one pool.
//!
//! Three small tables, compiled once and looked up by every request: an objective's name to its priority, a model's name to what serves it,
//! a rewrite's match to its targets. They come from `InferenceObjective`, `InferenceModel` and `InferenceModelRewrite` objects; whoever
//! reads those puts the oldest object first, for age settles what two of them claim.
//!
//! No chains: a target is what the engine is asked for, whatever other objects say of that name.

use crate::sort::sort_by;
use std::fmt;

use crate::rng::Rng;

/// The most objectives, models or rewrite rules of one pool: as many as endpoints, since each is looked up in a table that every worker holds.
pub const OBJECTS_MAX: usize = 1024;

/// The most matches or targets of one model or rule. The reference allows ten targets.
pub const TARGETS_MAX: usize = 64;

/// The longest name, in bytes: objects' names have at most 253, names of models are paths at worst.
pub const NAME_BYTES_MAX: usize = 256;

/// The most bytes of all names of one pool together: a quarter of the largest message, which also carries the endpoints.
pub const NAMES_BYTES_MAX: usize = 1 << 20;

/// The largest weight of a target, as in the reference: sums of [`TARGETS_MAX`] of them fit 32 bits.
pub const TARGET_WEIGHT_MAX: u32 = 1_000_000;

/// The objects of a pool as they were written, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectsSpec {
    /// Objectives by name.
    pub objectives: Vec<ObjectiveSpec>,
    /// Models the pool serves. With any of them a model that is none of them is unknown.
    pub models: Vec<ModelSpec>,
    /// Rules of all rewrites: those of an older object first, those of one object in its order.
    pub rewrites: Vec<RewriteSpec>,
    /// A model that no object names is unknown, even where there is no [`ModelSpec`].
    pub strict_models: bool,
}

/// An `InferenceObjective`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectiveSpec {
    /// Its name.
    pub name: String,
    /// Higher is more important; below 0 may be shed.
    pub priority: i32,
}

/// An `InferenceModel`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// The model as requests name it.
    pub name: String,
    /// Priority of its requests; see [`Criticality::priority`].
    pub priority: i32,
    /// What the engine is asked for; empty: the model itself.
    pub targets: Vec<TargetSpec>,
}

/// A rule of an `InferenceModelRewrite`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RewriteSpec {
    /// Models it is for; empty: all.
    pub models: Vec<String>,
    /// What the engine is asked for; empty: the model itself.
    pub targets: Vec<TargetSpec>,
}

/// One of several models to be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetSpec {
    /// The model as the engine knows it.
    pub model: String,
    /// Its share, 0 to [`TARGET_WEIGHT_MAX`]. Without any weight all targets have the same share; beside weighted ones an unweighted has none.
    pub weight: Option<u32>,
}

/// How important an `InferenceModel` says its requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Criticality {
    /// Never shed.
    Critical,
    /// What holds when nothing is said.
    Standard,
    /// May be shed.
    Sheddable,
}

/// The objects of a pool, compiled.
#[derive(Debug, Default)]
pub struct Objects {
    /// By name.
    objectives: Box<[(Box<str>, i32)]>,
    /// By name.
    models: Box<[(Box<str>, Model)]>,
    /// By model; positions in `rules`.
    exact: Box<[(Box<str>, usize)]>,
    /// The rule for models of which none speaks by name; a position in `rules`.
    generic: Option<usize>,
    rules: Box<[Targets]>,
    /// Every target of a model, by name; positions say nothing.
    targets: Box<[(Box<str>, usize)]>,
    strict_models: bool,
}

#[derive(Debug)]
struct Model {
    priority: i32,
    targets: Targets,
}

/// Targets with the sum of the weights up to and including each.
#[derive(Debug)]
struct Targets(Box<[(Box<str>, u32)]>);

/// What a request asks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked<'a> {
    /// The model its body names; empty when the body is opaque: then nothing is said of models.
    pub model: &'a str,
    /// Name of its objective.
    pub objective: Option<&'a str>,
    /// Another model to be asked for, where no object says otherwise.
    pub rewrite: Option<&'a str>,
}

/// What the objects make of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved<'a> {
    /// The model to ask the engine for; `None`: the one the body names.
    pub target_model: Option<&'a str>,
    /// Higher is more important; below 0 may be shed.
    pub priority: i32,
}

/// The request names a model that this pool does not serve. The client is at fault; the same request will fail again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownModel<'a>(
    /// The model.
    pub &'a str,
);

/// Why objects were refused whole. Whoever sent them is at fault; sending the same again will fail the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidObjects {
    /// More rows of this kind than allowed.
    TooMany {
        /// Which.
        what: &'static str,
        /// How many.
        count: usize,
        /// How many are allowed.
        max: usize,
    },
    /// A name that is empty or longer than [`NAME_BYTES_MAX`].
    Name {
        /// Of what.
        what: &'static str,
        /// Its length in bytes.
        bytes: usize,
    },
    /// All names together are longer than [`NAMES_BYTES_MAX`].
    TooLong(usize),
    /// A weight above [`TARGET_WEIGHT_MAX`].
    Weight(u32),
}

// === impl Criticality ===

impl Criticality {
    /// Critical 1, Standard 0, Sheddable -1.
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
    /// Checks and compiles. Of two objectives or models of one name the first counts.
    ///
    /// # Errors
    /// [`InvalidObjects`] names the limit that is broken.
    pub fn build(spec: &ObjectsSpec) -> Result<Self, InvalidObjects> {
        let ObjectsSpec { objectives, models, rewrites, strict_models } = spec;
        spec.check()?;
        let mut exact = Vec::new();
        for (position, rule) in rewrites.iter().enumerate() {
            exact.extend(rule.models.iter().map(|model| (model.as_str().into(), position)));
        }
        let mut targets = Vec::new();
        for model in models {
            targets.extend(model.targets.iter().map(|target| (target.model.as_str().into(), 0)));
        }
        Ok(Self {
            targets: table(targets),
            objectives: table(objectives.iter().map(|o| (o.name.as_str().into(), o.priority))),
            models: table(models.iter().map(|m| {
                let model = Model { priority: m.priority, targets: Targets::new(&m.targets) };
                (m.name.as_str().into(), model)
            })),
            exact: table(exact),
            generic: rewrites.iter().position(|rule| rule.models.is_empty()),
            rules: rewrites.iter().map(|rule| Targets::new(&rule.targets)).collect(),
            strict_models: *strict_models,
        })
    }

    /// Which model to ask the engine for, and how important the request is.
    ///
    /// Targets of an `InferenceModel` go before rewrites, since it speaks of this model in this pool; a rewrite that names the model before one for
    /// all; then the older; then what the request itself asks for. An objective this pool has goes before the model's criticality.
    ///
    /// # Errors
    /// [`UnknownModel`] where the pool lists its models and this one (or the one `rewrite` asks for) is not listed, or is listed with targets
    /// that all have weight 0: a name that is taken but not served.
    pub fn resolve<'a>(&'a self, asked: Asked<'a>, rng: &mut Rng) -> Result<Resolved<'a>, UnknownModel<'a>> {
        let objective = asked.objective.and_then(|name| find(&self.objectives, name)).copied();
        if asked.model.is_empty() {
            return Ok(Resolved { target_model: None, priority: objective.unwrap_or(0) });
        }
        self.known(asked.model)?;
        let model = find(&self.models, asked.model);
        let mut priority = model.map_or(0, |m| m.priority);
        let target_model = match model.map(|m| &m.targets).filter(|t| !t.is_empty()).or_else(|| self.rule(asked.model)) {
            Some(targets) if targets.is_empty() => None,
            Some(targets) => Some(targets.choose(rng).ok_or(UnknownModel(asked.model))?),
            None => {
                // Asking by header must get nobody what asking by body would not.
                if let Some(rewrite) = asked.rewrite {
                    self.known(rewrite)?;
                    priority = priority.min(find(&self.models, rewrite).map_or(0, |m| m.priority));
                }
                asked.rewrite
            }
        };
        Ok(Resolved { target_model: target_model.filter(|target| *target != asked.model), priority: objective.unwrap_or(priority) })
    }

    /// Does an `InferenceModel` say that the pool serves this model?
    #[must_use]
    pub fn names(&self, model: &str) -> bool {
        find(&self.models, model).is_some()
    }

    /// Does an `InferenceModel` have this model as a target?
    #[must_use]
    pub fn targets(&self, model: &str) -> bool {
        find(&self.targets, model).is_some()
    }

    fn known<'a>(&self, model: &'a str) -> Result<(), UnknownModel<'a>> {
        let known = match self.models.is_empty() {
            false => find(&self.models, model).is_some(),
            true => !self.strict_models || find(&self.exact, model).is_some(),
        };
        if known { Ok(()) } else { Err(UnknownModel(model)) }
    }

    fn rule(&self, model: &str) -> Option<&Targets> {
        self.rules.get(find(&self.exact, model).copied().or(self.generic)?)
    }
}

/// Sorted by name; of equal names the first stays.
fn table<V>(rows: impl IntoIterator<Item = (Box<str>, V)>) -> Box<[(Box<str>, V)]> {
    let mut rows: Vec<(usize, Box<str>, V)> = rows.into_iter().enumerate().map(|(at, (name, value))| (at, name, value)).collect();
    sort_by(&mut rows, |(i, a, _), (j, b, _)| (a, i) < (b, j));
    rows.dedup_by(|(_, later, _), (_, first, _)| later == first);
    rows.into_iter().map(|(_, name, value)| (name, value)).collect()
}

fn find<'t, V>(table: &'t [(Box<str>, V)], name: &str) -> Option<&'t V> {
    let position = table.binary_search_by(|(key, _)| (**key).cmp(name)).ok()?;
    table.get(position).map(|(_, value)| value)
}

// === impl Targets ===

impl Targets {
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

    /// One of them, by weight; `None` when no weight is above 0.
    fn choose(&self, rng: &mut Rng) -> Option<&str> {
        let total = self.0.last().map_or(0, |(_, sum)| *sum);
        let drawn = u32::try_from(rng.below(usize::try_from(total).ok()?)).ok()?;
        self.0.iter().find(|(_, sum)| drawn < *sum).map(|(model, _)| &**model)
    }
}

// === impl ObjectsSpec ===

impl ObjectsSpec {
    /// Are there none, so that every request passes as it is?
    #[must_use]
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
        if bytes > NAMES_BYTES_MAX { Err(InvalidObjects::TooLong(bytes)) } else { Ok(()) }
    }
}

fn at_most(what: &'static str, count: usize, max: usize) -> Result<(), InvalidObjects> {
    if count > max { Err(InvalidObjects::TooMany { what, count, max }) } else { Ok(()) }
}

fn name(what: &'static str, name: &str) -> Result<usize, InvalidObjects> {
    let bytes = name.len();
    if (1..=NAME_BYTES_MAX).contains(&bytes) { Ok(bytes) } else { Err(InvalidObjects::Name { what, bytes }) }
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
            Self::TooMany { what, count, max } => write!(f, "{count} {what}, at most {max} are allowed"),
            Self::Name { what, bytes } => write!(f, "the name of {what} has {bytes} bytes, 1 to {NAME_BYTES_MAX} are allowed"),
            Self::TooLong(bytes) => write!(f, "names of {bytes} bytes together, at most {NAMES_BYTES_MAX} are allowed"),
            Self::Weight(weight) => write!(f, "a weight of {weight}, at most {TARGET_WEIGHT_MAX} is allowed"),
        }
    }
}

impl std::error::Error for InvalidObjects {}
