//! The metadata of a KEDA trigger, which names a group of a pool and its goal.

use std::collections::BTreeMap;

use learning::scaling::ScalingGoal;
use scheduler::ENDPOINTS_MAX;

use super::EndpointGroup;
use crate::cli::args::{duration, spare};

/// The keys of a trigger's metadata. KEDA adds keys of its own to those of the operator.
const KEYS: [&str; 9] = [
    "pool",
    "role",
    "modelName",
    "ttft",
    "drain",
    "startup",
    "spare",
    "minReplicas",
    "maxReplicas",
];

/// The group and the goal that the metadata of a trigger names.
#[derive(Clone, Debug, PartialEq)]
pub struct ScalingRequest {
    pub pool: String,
    /// The role of the group, if the trigger names one.
    role: Option<String>,
    /// A model that the group serves, if the trigger names one.
    model: Option<String>,
    pub goal: ScalingGoal,
}

// === impl ScalingRequest ===

impl ScalingRequest {
    /// Reads the metadata of a trigger. Missing values come from `goal`. A daemon with one pool
    /// needs no pool name.
    ///
    /// # Errors
    /// Fails if a key is missing or invalid. The error names the key.
    pub fn read<'p>(
        metadata: &BTreeMap<String, String>,
        goal: &ScalingGoal,
        mut pools: impl ExactSizeIterator<Item = &'p str>,
    ) -> Result<Self, String> {
        let text = |key: &str| {
            metadata
                .get(key)
                .map(String::as_str)
                .filter(|text| !text.is_empty())
        };
        let seconds = |key: &str, default: f64| {
            let given = text(key).map(|text| duration(text).map_err(|why| format!("{key}: {why}")));
            given
                .transpose()
                .map(|given| given.map_or(default, |given| given.as_secs_f64()))
        };
        let count = |key: &str, default: u32| {
            let valid = |text: &str| {
                text.parse()
                    .ok()
                    .filter(|count: &u32| usize::try_from(*count).is_ok_and(|n| n <= ENDPOINTS_MAX))
            };
            let read = |text: &str| {
                valid(text).ok_or_else(|| format!("{key}: give a number from 0 to {ENDPOINTS_MAX}"))
            };
            text(key)
                .map(read)
                .transpose()
                .map(|given| given.unwrap_or(default))
        };
        let spare = text("spare")
            .map(|text| spare(text).map_err(|why| format!("spare: {why}")))
            .transpose()?;
        let goal = ScalingGoal {
            ttft_s: seconds("ttft", goal.ttft_s)?,
            drain_s: seconds("drain", goal.drain_s)?,
            startup_s: seconds("startup", goal.startup_s)?,
            spare: spare.unwrap_or(goal.spare),
            replicas: (
                count("minReplicas", goal.replicas.0)?,
                count("maxReplicas", goal.replicas.1)?,
            ),
        };
        let pool = match (text("pool"), pools.len()) {
            (Some(pool), _) if pools.any(|known| known == pool) => pool.to_owned(),
            (Some(_), _) => return Err("pool: this daemon has no pool of that name".to_owned()),
            (None, 1) => pools.next().unwrap_or_default().to_owned(),
            (None, _) => return Err("pool: this daemon has several, name one".to_owned()),
        };
        if let Some(unknown) = metadata.keys().find(|key| is_misspelt(key)) {
            return Err(format!("{unknown}: write it as one of {}", KEYS.join(", ")));
        }
        Ok(Self {
            pool,
            role: text("role").map(str::to_owned),
            model: text("modelName").map(str::to_owned),
            goal,
        })
    }

    /// Returns the group of the trigger among those of its pool; `None` if the pool has no
    /// endpoints.
    ///
    /// # Errors
    /// Fails if no group matches, or several do.
    pub fn group<'g>(
        &self,
        groups: &'g [EndpointGroup],
    ) -> Result<Option<&'g EndpointGroup>, String> {
        let serves = |group: &&EndpointGroup, model: &str| {
            group.key.1.is_empty() || group.key.1.iter().any(|name| **name == *model)
        };
        let mut meant = groups
            .iter()
            .filter(|group| {
                self.role
                    .as_deref()
                    .is_none_or(|role| group.key.0.name() == role)
            })
            .filter(|group| {
                self.model
                    .as_deref()
                    .is_none_or(|model| serves(group, model))
            });
        match (meant.next(), meant.next()) {
            (Some(group), None) => Ok(Some(group)),
            (Some(_), Some(_)) => Err(
                "several groups of endpoints match: give role (prefill, decode, both) or modelName"
                    .to_owned(),
            ),
            (None, _) if groups.is_empty() => Ok(None),
            (None, _) => Err("no endpoint of the pool has this role and modelName".to_owned()),
        }
    }
}

/// Returns whether this is one of [`KEYS`] in another spelling. Other keys may belong to KEDA.
fn is_misspelt(key: &str) -> bool {
    let plain = |key: &str| key.replace(['-', '_'], "").to_ascii_lowercase();
    !KEYS.contains(&key) && KEYS.iter().any(|known| plain(known) == plain(key))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOAL: ScalingGoal = ScalingGoal {
        ttft_s: 2.0,
        drain_s: 60.0,
        startup_s: 30.0,
        spare: 1.0,
        replicas: (1, 10),
    };

    fn read(pairs: &[(&str, &str)], pools: &[&str]) -> Result<ScalingRequest, String> {
        let metadata = pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        ScalingRequest::read(&metadata, &GOAL, pools.iter().copied())
    }

    #[test]
    fn a_trigger_sets_what_it_wants_and_takes_the_rest_from_the_daemon() {
        let found = read(&[("scalerAddress", "switchpointd:9005")], &["p"]).unwrap();
        assert_eq!((found.pool.as_str(), found.goal), ("p", GOAL));
        let found = read(
            &[
                ("pool", "q"),
                ("ttft", "500ms"),
                ("startup", "5m"),
                ("spare", "2.5"),
                ("maxReplicas", "7"),
            ],
            &["p", "q"],
        )
        .unwrap();
        assert_eq!(
            found.goal,
            ScalingGoal {
                ttft_s: 0.5,
                startup_s: 300.0,
                spare: 2.5,
                replicas: (1, 7),
                ..GOAL
            }
        );
    }

    #[test]
    fn errors_name_the_key() {
        for (pairs, expected) in [
            (&[][..], "pool: this daemon has several"),
            (&[("pool", "r")], "pool: this daemon has no pool"),
            (&[("pool", "p"), ("ttft", "soon")], "ttft: "),
            (&[("pool", "p"), ("drain", "0s")], "drain: "),
            (&[("pool", "p"), ("spare", "NaN")], "spare: "),
            (&[("pool", "p"), ("minReplicas", "-1")], "minReplicas: "),
            (&[("pool", "p"), ("maxReplicas", "1025")], "maxReplicas: "),
            (
                &[("pool", "p"), ("start-up", "1m")],
                "start-up: write it as one of ",
            ),
        ] {
            let found = read(pairs, &["p", "q"]).unwrap_err();
            assert!(found.starts_with(expected), "{pairs:?}: {found}");
        }
    }
}
