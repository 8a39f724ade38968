//! Profiles that are ready to run: filters, weighted scorers and a picker.

use crate::plugin::{Decider, Filter, Picker, Scorer, Shedder};

/// A profile that is ready to run. Each use of a plugin has a separate instance. Plugins keep no
/// data between requests.
#[derive(Debug)]
pub(crate) struct Profile {
    pub(crate) name: Box<str>,
    pub(crate) filters: Vec<(Box<str>, Box<dyn Filter>)>,
    pub(crate) scorers: Vec<(Box<str>, f32, Box<dyn Scorer>)>,
    pub(crate) shedders: Vec<Box<dyn Shedder>>,
    pub(crate) picker: Box<dyn Picker>,
    /// The length of the ranked list, if the picker's parameters set it.
    pub(crate) listed: Option<usize>,
    /// The maximum number of endpoints in the profile's ranked list.
    pub(crate) ranked_max: usize,
}

/// The profiles of a pipeline, and the deciders that its handler uses.
#[derive(Debug)]
pub(crate) struct Profiles {
    profiles: Vec<Profile>,
    deciders: Vec<(Box<str>, Box<dyn Decider>)>,
}

// === impl Profile ===

impl Profile {
    /// Whether the profile ranks endpoints that would miss SLOs behind all others.
    pub(crate) fn puts_late_last(&self) -> bool {
        !self.shedders.is_empty()
    }
}

// === impl Profiles ===

impl Profiles {
    pub(crate) fn new(profiles: Vec<Profile>) -> Self {
        Self {
            profiles,
            deciders: Vec::new(),
        }
    }

    pub(crate) fn add_decider(&mut self, name: &str, decider: Box<dyn Decider>) {
        self.deciders.push((name.into(), decider));
    }

    pub(crate) fn count(&self) -> usize {
        self.profiles.len()
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|profile| *profile.name == *name)
    }

    pub(crate) fn only(&self) -> Option<&Profile> {
        self.profiles.first()
    }

    pub(crate) fn decider(&self, name: &str) -> Option<&dyn Decider> {
        self.deciders
            .iter()
            .find(|(decider, _)| **decider == *name)
            .map(|(_, decider)| &**decider)
    }
}
