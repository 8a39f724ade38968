//! The names under which a pool's counts are shown: models, drop reasons, bands. Clients choose
//! some of these names, and a proxy may invent names.
//!
//! Once there are several owners, each has a share for the names that no other owner reports. Each
//! origin has a share for the names that no other origin reports. A name that several owners report
//! uses no share. Names beyond the shares are counted as one. A name is removed when no VM reports
//! it any more.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::state::peer::Origin;

/// The time for which a name stays after the last report with this name. The time is longer than a
/// proxy takes to restart or to find the daemon again.
pub const NAME_KEPT: Duration = Duration::from_secs(600);

/// The number of parts into which the names are divided. While several owners report, each owner
/// may use one part. The same limit applies to origins. For models, the limit is above the number
/// that one VM reports ([`pool_state::MODELS_MAX`]).
const SHARE_PARTS: usize = 8;

/// The names in use, and the origins that report them.
#[derive(Debug)]
pub struct ReportedNames<N> {
    names_max: usize,
    names: BTreeMap<N, NameUse>,
    /// The names of each owner and each origin.
    levels: [BTreeMap<Origin, OriginNames>; 2],
}

#[derive(Debug)]
struct NameUse {
    /// The only owner, and the only origin, that reports the name; `None` if several do.
    only: [Option<Origin>; 2],
    reported_at: Instant,
}

#[derive(Debug)]
struct OriginNames {
    /// The number of names that only this owner or origin reports.
    own: usize,
    reported_at: Instant,
}

// === impl ReportedNames ===

impl<N: Ord + Clone> ReportedNames<N> {
    /// Creates the table without names, for at most `names_max`.
    pub fn new(names_max: usize) -> Self {
        Self {
            names_max,
            names: BTreeMap::new(),
            levels: [BTreeMap::new(), BTreeMap::new()],
        }
    }

    /// Returns whether counts under this name are shown.
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
        let levels = origin.levels();
        for (level, of) in levels.iter().enumerate() {
            let Some(rows) = self.levels.get_mut(level) else {
                continue;
            };
            let before = rows.len();
            let row = rows.entry(of.clone()).or_insert(OriginNames {
                own: 0,
                reported_at: now,
            });
            row.reported_at = now;
            if before == 1 && rows.len() == 2 {
                self.trim(level);
            }
        }
        for name in names {
            self.report_one(&levels, name, now);
        }
    }

    fn report_one(&mut self, levels: &[Origin; 2], name: &N, now: Instant) {
        if let Some(known) = self.names.get_mut(name) {
            known.reported_at = now;
            let all = known.only.iter_mut().zip(&mut self.levels).zip(levels);
            for ((only, rows), of) in all {
                if only.as_ref().is_some_and(|only| only != of)
                    && let Some(only) = only.take()
                    && let Some(row) = rows.get_mut(&only)
                {
                    row.own -= 1;
                }
            }
            return;
        }
        let names_max = self.names_max;
        let has_room = self.levels.iter().zip(levels).all(|(rows, of)| {
            rows.get(of)
                .is_some_and(|row| row.own < share(rows, names_max))
        });
        if !has_room || self.names.len() >= names_max {
            return;
        }
        for (rows, of) in self.levels.iter_mut().zip(levels) {
            if let Some(row) = rows.get_mut(of) {
                row.own += 1;
            }
        }
        let only = levels.clone().map(Some);
        let reported_at = now;
        self.names
            .insert(name.clone(), NameUse { only, reported_at });
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
        for rows in &mut self.levels {
            rows.retain(|_, of| !is_old(of.reported_at));
        }
        expired
    }

    /// Removes the names beyond the shares of the owners, or of the origins.
    fn trim(&mut self, level: usize) {
        let Some(rows) = self.levels.get(level) else {
            return;
        };
        let share = share(rows, self.names_max);
        let mut excess = Vec::new();
        for (of, row) in rows {
            let is_own = |known: &NameUse| known.only.get(level) == Some(&Some(of.clone()));
            let own = self.names.iter().filter(|(_, known)| is_own(known));
            excess.extend(own.skip(share.min(row.own)).map(|(name, _)| name.clone()));
        }
        excess.iter().for_each(|name| self.remove(name));
    }

    fn remove(&mut self, name: &N) {
        let Some(known) = self.names.remove(name) else {
            return;
        };
        for (only, rows) in known.only.iter().zip(&mut self.levels) {
            if let Some(row) = only.as_ref().and_then(|only| rows.get_mut(only)) {
                row.own -= 1;
            }
        }
    }
}

/// Returns the maximum number of names that only one of these owners or origins reports.
fn share(rows: &BTreeMap<Origin, OriginNames>, names_max: usize) -> usize {
    if rows.len() > 1 {
        names_max / SHARE_PARTS
    } else {
        names_max
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
        assert!(names.levels.iter().all(|rows| rows.len() == 1));
        assert_eq!(names.expire(later + NAME_KEPT), [2]);
        assert!(names.levels.iter().all(BTreeMap::is_empty));
    }
}
