//! The names under which a pool's counts are shown: models, drop reasons, bands. Clients choose
//! some of them, and a proxy may invent them.
//!
//! A name that several origins report needs no share. Each origin has a share of the other names,
//! once there is another origin. Its further names count as one. A name is removed when no VM
//! reports it any more.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::state::peer::Origin;

/// How long a name stays after the last report with it. This is longer than a proxy takes to
/// restart or to find the daemon again.
pub const NAME_KEPT: Duration = Duration::from_secs(600);

/// While there are other origins, an origin may use this part of all names. For models, that is
/// more than one VM reports ([`pool_state::MODELS_MAX`]).
const SHARE_PARTS: usize = 8;

/// The names in use, and the origins that report them.
#[derive(Debug)]
pub struct ReportedNames<N> {
    names_max: usize,
    names: BTreeMap<N, NameUse>,
    /// The time when each origin last reported.
    origins: BTreeMap<Origin, OriginNames>,
}

#[derive(Debug)]
struct NameUse {
    /// The only origin that reports it; `None` if there are several.
    only: Option<Origin>,
    reported_at: Instant,
}

#[derive(Debug)]
struct OriginNames {
    /// The names that only this origin reports.
    own: usize,
    reported_at: Instant,
}

// === impl ReportedNames ===

impl<N: Ord + Clone> ReportedNames<N> {
    /// Starts without names, and keeps at most `names_max`.
    pub fn new(names_max: usize) -> Self {
        Self {
            names_max,
            names: BTreeMap::new(),
            origins: BTreeMap::new(),
        }
    }

    /// Whether counts of this name are shown.
    pub fn has(&self, name: &N) -> bool {
        self.names.contains_key(name)
    }

    /// Records a report of `origin` with these names.
    pub fn report<'n>(
        &mut self,
        origin: &Origin,
        names: impl IntoIterator<Item = &'n N>,
        now: Instant,
    ) where
        N: 'n,
    {
        let is_first = !self.origins.contains_key(origin);
        let of = self.origins.entry(origin.clone()).or_insert(OriginNames {
            own: 0,
            reported_at: now,
        });
        of.reported_at = now;
        if is_first && self.origins.len() == 2 {
            self.trim_all();
        }
        for name in names {
            self.report_one(origin, name, now);
        }
    }

    fn report_one(&mut self, origin: &Origin, name: &N, now: Instant) {
        if let Some(known) = self.names.get_mut(name) {
            known.reported_at = now;
            if known.only.as_ref().is_some_and(|only| only != origin)
                && let Some(only) = known.only.take()
                && let Some(of) = self.origins.get_mut(&only)
            {
                of.own -= 1;
            }
            return;
        }
        let share = self.share();
        if let Some(of) = self.origins.get_mut(origin)
            && of.own < share
            && self.names.len() < self.names_max
        {
            of.own += 1;
            let only = Some(origin.clone());
            let reported_at = now;
            self.names
                .insert(name.clone(), NameUse { only, reported_at });
        }
    }

    /// Forgets the names that are no longer reported. Returns the forgotten names.
    pub fn expire(&mut self, now: Instant) -> Vec<N> {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= NAME_KEPT;
        let expired: Vec<N> = self
            .names
            .iter()
            .filter(|(_, known)| is_old(known.reported_at))
            .map(|(name, _)| name.clone())
            .collect();
        expired.iter().for_each(|name| self.remove(name));
        self.origins.retain(|_, of| !is_old(of.reported_at));
        expired
    }

    /// The maximum number of names that only one origin reports.
    fn share(&self) -> usize {
        if self.origins.len() > 1 {
            self.names_max / SHARE_PARTS
        } else {
            self.names_max
        }
    }

    /// Applies the share of each origin when the limit begins to apply.
    fn trim_all(&mut self) {
        let share = self.share();
        let mut excess = Vec::new();
        for (origin, of) in &self.origins {
            let own = self
                .names
                .iter()
                .filter(|(_, known)| known.only.as_ref() == Some(origin));
            excess.extend(own.skip(share.min(of.own)).map(|(name, _)| name.clone()));
        }
        excess.iter().for_each(|name| self.remove(name));
    }

    fn remove(&mut self, name: &N) {
        if let Some(known) = self.names.remove(name)
            && let Some(only) = known.only
            && let Some(of) = self.origins.get_mut(&only)
        {
            of.own -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(last: u8) -> Origin {
        Origin {
            certificate: None,
            address: Some([10, 0, 0, last].into()),
        }
    }

    #[test]
    fn made_up_names_of_one_origin_leave_room_for_all_others() {
        let mut names = ReportedNames::new(64);
        let now = Instant::now();
        let made_up: Vec<u32> = (1_000..2_000).collect();
        names.report(&of(1), &made_up, now);
        assert_eq!(names.names.len(), 64, "there is no other");
        names.report(&of(2), &[1, 2], now);
        assert!(names.has(&1) && names.has(&2));
        names.report(&of(1), &made_up, now);
        assert_eq!(names.names.len(), 8 + 2, "an eighth");
        // Names that two origins report do not count against a share.
        names.report(&of(3), &(1..=11).collect::<Vec<_>>(), now);
        assert!((1..=10).all(|name| names.has(&name)) && !names.has(&11));
    }

    #[test]
    fn a_name_goes_when_nobody_reports_it_any_more() {
        let mut names = ReportedNames::new(64);
        let now = Instant::now();
        names.report(&of(1), &[1, 2], now);
        names.report(&of(2), &[2], now);
        let later = now + NAME_KEPT / 2;
        names.report(&of(2), &[2], later);
        assert_eq!(names.expire(now + NAME_KEPT), [1]);
        assert!(names.has(&2));
        assert_eq!(names.origins.len(), 1);
        assert_eq!(names.expire(later + NAME_KEPT), [2]);
        assert!(names.origins.is_empty());
    }
}
