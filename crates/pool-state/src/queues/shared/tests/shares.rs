//! The shares of a full queue hold for all VMs together.

use super::*;

/// Three VMs whose queues hold this many requests together.
fn limited(requests: f64) -> Process {
    Process::new(3, &[number("maxRequests", requests)], 0)
}

impl Process {
    /// How many requests of this flow were refused, and how many are queued.
    fn refused_and_queued(&self, flow: &str) -> (usize, usize) {
        let refused = self.jobs.iter().filter(|job| job.refused);
        let queued = self.vms.iter().flat_map(|vm| &vm.queued);
        (
            refused.filter(|job| job.flow == flow).count(),
            queued
                .filter(|(_, job)| self.jobs[*job].flow == flow)
                .count(),
        )
    }
}

#[test]
fn a_flow_that_fills_the_queue_through_other_vms_makes_room() {
    for conflict_each in [0, 2, 3] {
        let mut process = limited(8.0);
        process.conflict_each = conflict_each;
        (0..10).for_each(|at| process.arrives(at % 2, 0, "many", 1));
        (0..4).for_each(|_| process.arrives(2, 0, "few", 1));
        (0..3).for_each(|_| process.passes(10));
        assert_eq!(process.refused_and_queued("few"), (0, 4), "half is theirs");
        assert_eq!(process.refused_and_queued("many"), (4, 4));
        process.arrives(2, 0, "few", 1);
        assert_eq!(process.refused_and_queued("few"), (1, 4), "and not more");
    }
}

#[test]
fn who_has_most_in_other_vms_displaces_nobody_here() {
    let mut process = limited(12.0);
    (0..8).for_each(|_| process.arrives(1, 0, "many", 1));
    for flow in ["x", "y", "z", "x", "y", "z"] {
        process.arrives(0, 0, flow, 1);
    }
    process.arrives(0, 0, "many", 1);
    process.passes(10);
    assert_eq!(process.refused_and_queued("many"), (1, 6));
    for flow in ["x", "y", "z"] {
        assert_eq!(process.refused_and_queued(flow), (0, 2), "{flow}");
    }
}

#[test]
fn the_lowest_band_of_another_vm_makes_room_by_the_flow_with_most_of_it() {
    let mut process = limited(8.0);
    (0..2).for_each(|_| process.arrives(0, 0, "", 1));
    (0..7).for_each(|_| process.arrives(1, -1, "many", 1));
    process.arrives(2, -1, "few", 1);
    (0..5).for_each(|_| process.arrives(0, 3, "high", 1));
    process.passes(10);
    assert_eq!(process.refused_and_queued("high"), (0, 5));
    assert_eq!(process.refused_and_queued("few"), (0, 1));
    assert_eq!(process.refused_and_queued("many"), (5, 2));
}
