//! The requests that the other proxies of a pool hold, and the room that remains for this proxy.
//!
//! Proxies have no common order, because a hand-over would cost a sharing delay each time. Each
//! proxy takes room at once while its share of the running requests is at most its share of the
//! backlog plus a sixteenth, rounded up to a request. Above that share, a proxy leaves the room
//! that it finds to the others for [`PATIENCE_MS`] and twice the sharing delay. After that, the
//! proxy takes the room. While other proxies hold requests of a higher band, this share is divided
//! by [`LOWER_PARTS`].
//!
//! Other proxies may be hostile. A proxy that really holds requests takes room that is left to it.
//! If such room stayed unused [`UNUSED_MAX`] times, this proxy leaves none for [`UNUSED_MS`]. A
//! priority that this proxy does not know counts as the highest that it knows.

use scheduler::Timestamp;
use scheduler::flow::QueuedInBand;

/// How long a proxy leaves room to other proxies, in ms, in addition to two sharing delays: one
/// until the others know of the room, and one until their pick is known here.
const PATIENCE_MS: u64 = 10;

/// A proxy may exceed its share of the running requests by one part in this many. The proxy whose
/// request ends knows of the room first. If this proxy leaves the room to others, several proxies
/// find the room at the same time, and all of them take it. In the simulation with four proxies and
/// without a margin, chat's time to first token is 300 ms at p99. With a margin of an eighth or a
/// sixteenth it is 250 ms.
const MARGIN_PARTS: u64 = 16;

/// While other proxies hold requests of a higher band, the share of a band here is divided by this
/// number. So a proxy that makes up a high priority leaves this proxy a quarter of its share, as
/// the daemon's bound for equal bands does.
const LOWER_PARTS: u64 = 4;

/// The maximum number of times in [`UNUSED_MS`] that room left to other proxies may stay unused.
/// Honest proxies also pass over some room, because a request does not fit, or because its client
/// has left.
const UNUSED_MAX: u32 = 4;

/// How long unused room is remembered, in ms. So a made-up backlog delays room for [`UNUSED_MAX`]
/// times [`PATIENCE_MS`], one twenty-fifth of this time.
const UNUSED_MS: u64 = 1_000;

/// A band forgets room that it left to other proxies after this many times its patience.
const STALE: u64 = 8;

/// The queues of the other proxies, as far as they are known.
#[derive(Debug, Default)]
pub(super) struct OutsideQueues {
    /// The requests that the other proxies hold together.
    bands: Vec<QueuedInBand>,
    /// The running requests of the other proxies.
    running: u64,
    delay_us: u64,
    /// The number of proxies, if nothing is received from the other proxies; 0 otherwise.
    alone_of: u32,
    /// This proxy's part of the running requests, when the load of the other proxies was last
    /// known.
    part: f64,
    /// The room that bands leave to other proxies.
    left: Vec<LeftRoom>,
    /// How often room that was left stayed unused, and when this last happened.
    unused: u32,
    unused_at: Timestamp,
}

#[derive(Debug)]
struct LeftRoom {
    priority: i32,
    since: Timestamp,
    /// Whether the band's patience is over.
    is_over: bool,
}

// === impl OutsideQueues ===

impl OutsideQueues {
    /// Sets the requests that the other proxies hold. Returns whether the bands have changed.
    pub(super) fn set(&mut self, bands: &[QueuedInBand], running: u64, delay_us: u64) -> bool {
        self.running = running;
        self.delay_us = delay_us;
        let is_changed = self.bands != bands;
        if is_changed {
            self.bands = bands.to_vec();
        }
        is_changed
    }

    /// Sets how many proxies there are, if nothing is received from the other proxies; 0 otherwise.
    pub(super) fn set_alone(&mut self, of: u32) {
        self.alone_of = of;
    }

    /// Sets this proxy's part of the running requests, while the load of the other proxies is
    /// known.
    pub(super) fn set_part(&mut self, part: f64) {
        self.part = part;
    }

    /// The share of each endpoint that this proxy may fill. Made-up proxies do not reduce the part
    /// that this proxy had.
    pub(super) fn share(&self) -> f64 {
        (1.0 / f64::from(self.alone_of.max(1))).max(self.part)
    }

    /// Whether a band leaves room to other proxies.
    pub(super) fn is_patient(&self) -> bool {
        !self.left.is_empty()
    }

    /// Returns for how many other proxies each pick here also counts, because their own picks are
    /// not known yet: all `active` ones, or 0 while this proxy and other proxies hold requests. In
    /// that case the shares separate the proxies, and an estimate would leave room empty.
    pub(super) fn proxies_per_pick(&self, holds: bool, active: u32) -> u32 {
        if holds && self.holds_any() { 0 } else { active }
    }

    /// Whether the other proxies hold any requests.
    pub(super) fn holds_any(&self) -> bool {
        !self.bands.is_empty()
    }

    /// Whether a band with `queued` requests here must leave the room that it finds to other
    /// proxies, while `running` requests run in total. `highest` is the highest known priority.
    pub(super) fn is_over_share(
        &self,
        priority: i32,
        highest: i32,
        queued: u64,
        running: u64,
    ) -> bool {
        let running = running.saturating_sub(self.running);
        let mut higher = false;
        let mut beside = 0;
        for band in self.bands.iter().filter(|band| band.requests > 0) {
            let counted = band.priority.min(highest);
            higher |= counted > priority;
            if counted == priority {
                beside += band.requests;
            }
        }
        // Over the share: (running + 1) / all > queued / (queued + beside), with the margin.
        let all = running + self.running + 1;
        let share = queued * all * (MARGIN_PARTS + 1);
        let parts = (queued + beside).max(1) * MARGIN_PARTS;
        if higher {
            running + 1 > share / (parts * LOWER_PARTS)
        } else {
            beside > 0 && running + 1 > share.div_ceil(parts)
        }
    }

    /// Records that a band over its share has found room. Returns whether the band leaves it to
    /// other proxies. The band no longer leaves room once its patience is over, until
    /// [`Self::took_room`]. So a claim that fails because another VM was first costs no further
    /// wait.
    pub(super) fn leaves_room(&mut self, priority: i32, now: Timestamp) -> bool {
        let patience_us = PATIENCE_MS * 1_000 + 2 * self.delay_us.min(1_000_000);
        self.left
            .retain(|left| now.us_since(left.since) < STALE * patience_us);
        if now.ms_since(self.unused_at) >= UNUSED_MS {
            self.unused = 0;
        }
        let is_left = self.left.iter_mut().find(|left| left.priority == priority);
        match is_left {
            None if self.unused >= UNUSED_MAX => false,
            None => {
                self.left.push(LeftRoom {
                    priority,
                    since: now,
                    is_over: false,
                });
                true
            }
            Some(left) => {
                left.is_over = now.us_since(left.since) >= patience_us;
                if left.is_over {
                    self.unused_at = now;
                }
                !left.is_over
            }
        }
    }

    /// Records that a request of the band took room, so the next room counts as other room. No
    /// other proxy used the room if the band's patience was over.
    pub(super) fn took_room(&mut self, priority: i32) {
        let unused = &mut self.unused;
        self.left.retain(|left| {
            let is_taken = left.priority == priority;
            *unused += u32::from(is_taken && left.is_over);
            !is_taken
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queued(priority: i32, requests: u64) -> QueuedInBand {
        QueuedInBand {
            priority,
            requests,
            bytes: 0,
        }
    }

    #[test]
    fn a_proxy_takes_its_share_of_the_backlog_at_once() {
        let mut outside = OutsideQueues::default();
        assert!(
            !outside.is_over_share(0, 9, 5, 100),
            "the others hold nothing"
        );
        outside.set(&[queued(0, 30)], 4, 0);
        // A quarter of the backlog and a sixteenth more, rounded up: two of six or seven requests.
        assert!(!outside.is_over_share(0, 9, 10, 5) && outside.is_over_share(0, 9, 10, 6));
        assert!(outside.is_over_share(0, 9, 10, 7));
        // A quarter of 1,000 and a sixteenth of that: 266 of them, rounded up.
        outside.set(&[queued(0, 30)], 734, 0);
        assert!(
            !outside.is_over_share(0, 9, 10, 734 + 265)
                && outside.is_over_share(0, 9, 10, 734 + 267)
        );
        outside.set(&[queued(1, 1)], 0, 0);
        assert!(
            outside.is_over_share(0, 9, 10, 0) && !outside.is_over_share(2, 9, 10, 100),
            "bands are in one order"
        );
    }

    #[test]
    fn room_is_left_to_others_for_a_while_only() {
        let mut outside = OutsideQueues::default();
        outside.set(&[queued(1, 1)], 0, 5_000);
        let at = |ms: u64| Timestamp(0).plus_ms(1_000 + ms);
        assert!(
            outside.leaves_room(0, at(0)) && outside.leaves_room(0, at(19)) && outside.is_patient()
        );
        assert!(!outside.leaves_room(0, at(20)));
        assert!(
            !outside.leaves_room(0, at(30)),
            "another VM of the process was faster in writing the order: the next try takes the room"
        );
        outside.took_room(1);
        assert!(
            !outside.leaves_room(0, at(31)) && outside.is_patient(),
            "that was another band"
        );
        outside.took_room(0);
        assert!(
            !outside.is_patient() && outside.leaves_room(0, at(32)),
            "other room"
        );
        assert!(outside.leaves_room(0, at(500)), "that was long ago");
    }

    #[test]
    fn room_that_nobody_takes_is_not_left_again_and_again() {
        let mut outside = OutsideQueues::default();
        outside.set(&[queued(i32::MAX, 1_000_000)], 1, 0);
        // A request finds room at any time.
        let mut taken = 0;
        let mut ms = 1_000;
        while ms < 11_000 {
            assert!(outside.is_over_share(0, 9, 10, 20));
            if outside.leaves_room(0, Timestamp(0).plus_ms(ms)) {
                ms += 1;
            } else {
                outside.took_room(0);
                taken += 1;
                ms += 2;
            }
        }
        assert!(
            taken >= 4_700,
            "{taken} of 5,000 beside a backlog that does not exist"
        );
    }

    #[test]
    fn room_that_others_take_is_left_to_them_for_ever() {
        let mut outside = OutsideQueues::default();
        outside.set(&[queued(1, 1)], 4, 0);
        for room in 0..1_000 {
            let now = Timestamp(0).plus_ms(1_000 + 200 * room);
            assert!(outside.leaves_room(0, now), "they took the last {room}");
        }
    }

    /// How many of 100 requests this proxy has in the end. Another proxy claims to hold the
    /// requests in `claims`, and takes all room that it finds or that is left to it.
    fn kept_beside(claims: &[QueuedInBand], highest: i32) -> u64 {
        let mut outside = OutsideQueues::default();
        let mut running = 100;
        for ended in 0..20_000_u64 {
            let dice = (ended.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) % 100;
            let is_own = dice < running;
            running -= u64::from(is_own);
            outside.set(claims, 99 - running, 0);
            if is_own && !outside.is_over_share(0, highest, 10, 99) {
                running += 1;
            }
        }
        running
    }

    #[test]
    fn a_priority_that_is_made_up_takes_three_quarters_of_the_room_at_most() {
        let made_up = [queued(i32::MAX, 1)];
        let kept = kept_beside(&made_up, 10);
        assert!(
            (24..=28).contains(&kept),
            "{kept} of 100 beside a higher band"
        );
        let kept = kept_beside(&made_up, 0);
        assert!(kept >= 90, "{kept} of 100: no band is higher than ours");
        let kept = kept_beside(&[queued(i32::MAX, 1), queued(0, 30)], 10);
        assert!(
            kept >= 5,
            "{kept} of 100 beside three times our requests, too"
        );
    }

    #[test]
    fn picks_stand_for_others_unless_all_hold() {
        let mut outside = OutsideQueues::default();
        assert_eq!(
            [true, false].map(|holds| outside.proxies_per_pick(holds, 3)),
            [3, 3]
        );
        outside.set(&[queued(0, 20)], 0, 0);
        assert_eq!(
            [true, false].map(|holds| outside.proxies_per_pick(holds, 3)),
            [0, 3]
        );
    }

    #[test]
    fn a_proxy_alone_keeps_its_part() {
        let mut outside = OutsideQueues::default();
        assert_eq!(outside.share(), 1.0);
        outside.set_alone(4);
        assert_eq!(outside.share(), 0.25);
        outside.set_part(0.75);
        assert_eq!(outside.share(), 0.75, "it had most of what ran");
        outside.set_alone(0);
        assert_eq!(outside.share(), 1.0);
    }
}
