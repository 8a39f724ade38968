//! Requests are given up only for waiting requests, once each, and only before their first byte.

use std::collections::BTreeSet;

use proptest::prelude::*;
use scheduler::PipelineSpec;
use scheduler::plugin::ParameterValue;

use super::super::tests::{Admitted, Drill, QueueClient, admit_queued, number, pipeline};
use super::*;

/// A pipeline whose endpoints take `seats` requests each, with eviction.
fn evicting(seats: f64, more: &[(String, ParameterValue)]) -> PipelineSpec {
    let eviction = [("eviction".to_owned(), ParameterValue::Flag(true))];
    pipeline(
        seats,
        eviction.into_iter().chain(more.iter().cloned()).collect(),
    )
}

/// Returns the number of requests given up, counted in their own bands and in those of the requests
/// that waited.
fn counted(drill: &Drill) -> [u64; 2] {
    let sum =
        |of: fn(&super::super::BandCounters) -> u64| drill.pool.queues().counters().map(of).sum();
    [
        sum(|counters| counters.given_up),
        sum(|counters| counters.given_up_for),
    ]
}

fn is_running(drill: &Drill, at: usize) -> bool {
    matches!(drill.clients[at].2, QueueClient::Running(_))
}

fn first_byte(drill: &mut Drill, at: usize) {
    if let Some((.., QueueClient::Running(hold))) = drill.clients.get_mut(at) {
        drill.pool.record_first_byte(hold);
    }
}

#[test]
fn the_newest_of_the_lowest_priority_goes_and_the_one_that_waits_takes_its_room() {
    let mut drill = Drill::new(1, &evicting(4.0, &[]));
    for priority in [-1, -2, -2, 0] {
        drill.arrives(priority, "", 10);
    }
    for (more, given_up) in [
        (1, &[2][..]),
        (-1, &[2, 1]),
        (-2, &[2, 1]),
        (0, &[2, 1, 5]),
        (0, &[2, 1, 5, 0]),
        (0, &[2, 1, 5, 0]),
    ] {
        drill.arrives(more, "", 10);
        assert_eq!(drill.given_up, given_up, "priority {more}");
    }
    assert!([3, 4, 7, 8].iter().all(|at| is_running(&drill, *at)));
    assert_eq!((counted(&drill), drill.queued()), ([4, 4], 2));
}

#[test]
fn without_the_option_or_after_the_first_byte_nothing_is_given_up() {
    let mut plain = Drill::new(1, &pipeline(1.0, Vec::new()));
    let mut begun = Drill::new(1, &evicting(1.0, &[]));
    for drill in [&mut plain, &mut begun] {
        drill.arrives(-1, "", 10);
        first_byte(drill, 0);
        drill.arrives(5, "", 10);
        drill.passes(500);
        assert!(drill.given_up.is_empty() && is_running(drill, 0) && drill.queued() == 1);
    }
}

#[test]
fn a_first_byte_between_the_mark_and_the_end_saves_a_request() {
    let mut drill = Drill::new(1, &evicting(1.0, &[]));
    drill.arrives(-1, "", 10);
    assert!(drill.pool.queues_mut().give_room(
        RoomAsk {
            endpoint: None,
            priority: 0
        },
        drill.now
    ));
    first_byte(&mut drill, 0);
    drill.release();
    assert!(drill.given_up.is_empty() && is_running(&drill, 0) && drill.pool.queues().is_empty());
    assert_eq!(counted(&drill), [0, 0]);
}

#[test]
fn a_request_that_was_held_before_is_given_up_like_others() {
    let mut drill = Drill::new(1, &evicting(1.0, &[number("minimumShare", 0.0)]));
    for priority in [0, -1] {
        drill.arrives(priority, "", 10);
    }
    drill.ends(0);
    assert!(is_running(&drill, 1));
    drill.arrives(0, "", 10);
    assert_eq!(
        (drill.given_up.as_slice(), is_running(&drill, 2)),
        (&[1][..], true)
    );
}

#[test]
fn what_a_band_was_owed_is_not_given_up() {
    let mut drill = Drill::new(1, &evicting(1.0, &[]));
    drill.arrives(1, "", 100);
    drill.arrives(-1, "", 100);
    let mut turn = 0;
    while !is_running(&drill, 1) {
        drill.arrives(1, "", 100);
        drill.ends(drill.order[turn]);
        turn += 1;
        assert!(turn < 100, "the band never got its share");
    }
    assert!(turn > 5 && drill.given_up.is_empty());
    drill.arrives(1, "", 100);
    assert!(drill.given_up.is_empty());
}

/// The flow that received less goes first. Its prompt is longer than the share that its band was
/// owed.
#[test]
fn what_went_for_the_share_of_its_band_is_not_given_up_though_it_cost_more() {
    let mut drill = Drill::new(1, &evicting(1.0, &[]));
    drill.arrives(-1, "served", 9_000);
    drill.ends(0);
    for (priority, flow, tokens) in [(1, "", 100), (-1, "served", 10), (-1, "other", 5_000)] {
        drill.arrives(priority, flow, tokens);
    }
    let mut turn = 1;
    while !is_running(&drill, 3) {
        drill.arrives(1, "", 100);
        drill.ends(drill.order[turn]);
        turn += 1;
        assert!(turn < 50, "the band never got its share");
    }
    drill.arrives(1, "", 100);
    assert!(drill.given_up.is_empty() && is_running(&drill, 3));
}

#[test]
fn a_burst_gives_up_so_many_in_a_second() {
    let mut drill = Drill::new(1, &evicting(200.0, &[number("ttlMs", 0.0)]));
    for priority in [-1, 0] {
        (0..200).for_each(|_| drill.arrives(priority, "", 1));
    }
    assert_eq!(drill.given_up.len(), REVOKED_PER_S_MAX as usize);
    drill.passes(1_000);
    assert_eq!(drill.given_up.len(), 2 * REVOKED_PER_S_MAX as usize);
}

#[test]
fn an_ask_that_no_other_vm_could_grant_is_repeated() {
    let mut drill = Drill::new(1, &evicting(1.0, &[]));
    drill.pool.queues_mut().set_peers(true, false);
    drill.arrives(0, "", 10);
    drill.arrives(5, "", 10);
    let mut asks = Vec::new();
    for at in (0..=3_000).step_by(100) {
        if at > 0 {
            drill.now = drill.now.plus_ms(100);
            let QueueClient::Queued(ticket) =
                std::mem::replace(&mut drill.clients[1].2, QueueClient::Gone)
            else {
                panic!("it is not queued")
            };
            let request = Drill::request(5, 10);
            let tried = admit_queued(&mut drill.pool, ticket, &request, drill.now);
            let Ok(Admitted::Queued(ticket)) = tried else {
                panic!("{tried:?}")
            };
            drill.clients[1].2 = QueueClient::Queued(ticket);
        }
        asks.extend(drill.pool.queues_mut().take_asks().iter().map(|_| at));
    }
    assert_eq!(asks, [0, 1_000, 2_000, 3_000]);
}

#[derive(Clone, Debug)]
enum RunEvent {
    Arrives { priority: i32, tokens: u32 },
    FirstByte(usize),
    Ends(usize),
    Passes(u64),
}

fn event() -> impl Strategy<Value = RunEvent> {
    prop_oneof![
        6 => (-3..3_i32, 1..3_000_u32).prop_map(|(priority, tokens)| RunEvent::Arrives { priority, tokens }),
        2 => (0..80_usize).prop_map(RunEvent::FirstByte),
        3 => (0..80_usize).prop_map(RunEvent::Ends),
        1 => (0..900_u64).prop_map(RunEvent::Passes),
    ]
}

proptest! {
    #[test]
    fn room_is_freed_once_and_no_more_are_given_up_than_wait(events in prop::collection::vec(event(), 1..150)) {
        let mut drill = Drill::new(1, &evicting(3.0, &[number("maxRequests", 40.0)]));
        let mut begun = BTreeSet::new();
        let mut waited = 0;
        let began = drill.now;
        for event in &events {
            let given_up = drill.given_up.len();
            match *event {
                RunEvent::Arrives { priority, tokens } => {
                    let sent = drill.sent;
                    drill.arrives(priority, "", tokens);
                    // The request waits, or another one was given up for it at once.
                    waited += usize::from(priority > -3 && (drill.sent == sent || drill.given_up.len() > given_up));
                }
                RunEvent::FirstByte(at) => {
                    first_byte(&mut drill, at);
                    if drill.clients.get(at).is_some() && is_running(&drill, at) {
                        begun.insert(at);
                    }
                }
                RunEvent::Ends(at) => drill.ends(at),
                RunEvent::Passes(ms) => drill.passes(ms),
            }
            let running = drill.clients.iter().filter(|(.., client)| matches!(client, QueueClient::Running(_))).count();
            let in_ledger: u32 = drill.pool.in_flight().rows().map(|(_, load)| load.requests).sum();
            prop_assert_eq!(in_ledger as usize, running);
            prop_assert!(running <= 3, "no room is given twice");
            let asks = 1 + usize::try_from(drill.now.ms_since(began) / ASK_AGAIN_MS).unwrap();
            prop_assert!(drill.given_up.len() <= waited * asks, "each asks once in a while");
            prop_assert!(drill.given_up.iter().all(|at| drill.clients[*at].0 < 0 && !begun.contains(at)));
            prop_assert_eq!(counted(&drill), [drill.given_up.len() as u64; 2]);
        }
        prop_assert_eq!(drill.given_up.iter().collect::<BTreeSet<_>>().len(), drill.given_up.len());
        (0..2 * drill.clients.len()).for_each(|at| drill.ends(at % drill.clients.len()));
        prop_assert!(drill.pool.queues().is_empty() && drill.pool.queues().revocations.running.is_empty());
        prop_assert_eq!(drill.pool.in_flight().rows().count(), 0, "nothing stays in the ledger");
    }
}
