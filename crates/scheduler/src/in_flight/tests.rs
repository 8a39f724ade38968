use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn endpoint(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(generation),
    }
}

fn load(requests: u32, prefill_tokens: u64, decode_tokens: u64) -> EndpointLoad {
    EndpointLoad {
        requests,
        prefill_tokens,
        decode_tokens,
        ..NOTHING
    }
}

/// Returns the load without the pending prefills, which a separate test checks.
fn plain(load: EndpointLoad) -> EndpointLoad {
    EndpointLoad {
        prefills: NO_PREFILLS,
        ..load
    }
}

fn rows(ledger: &InFlight) -> Vec<(EndpointRef, EndpointLoad)> {
    ledger
        .rows()
        .map(|(endpoint, load)| (endpoint, plain(load)))
        .collect()
}

#[test]
fn a_request_to_a_former_generation_is_in_no_queue() {
    let before = endpoint(3, 1);
    let after = endpoint(3, 2);
    let mut ledger = InFlight::default();
    let mut ticket = ledger.admit(before, 5);
    let _other = ledger.admit(after, 5);
    let slo = Slo {
        ttft_us: Some(9),
        tpot_us: None,
    };
    ledger.track(
        &mut ticket,
        TrackedSlo {
            slo,
            counts: slo,
            predicted: None,
        },
        "",
    );
    assert_eq!(
        (ledger.running(before).len(), ledger.running(after).len()),
        (0, 0)
    );
    assert_eq!(ledger.load(after).ttft_slo_us, None);
}

#[test]
fn a_prompt_may_change_until_the_first_token() {
    let a = endpoint(3, 1);
    let mut ledger = InFlight::default();
    let mut ticket = ledger.admit(a, 1_000);
    ledger.expect_output(&mut ticket, 50);
    let prefill = |ledger: &InFlight| {
        let load = ledger.load(a);
        (load.prefill_tokens, load.prefills.prompt_tokens)
    };
    assert_eq!(prefill(&ledger), (1_050, 1_000));
    ledger.set_prompt(&mut ticket, 0, 0);
    assert_eq!(prefill(&ledger), (0, 0));
    assert_eq!(ledger.load(a).requests, 1);
    ledger.set_prompt(&mut ticket, 600, 30);
    assert_eq!(prefill(&ledger), (630, 600));
    ledger.first_token(&mut ticket, 600);
    ledger.set_prompt(&mut ticket, 0, 0);
    assert_eq!(prefill(&ledger), (30, 0));
    ledger.release(ticket);
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn prompts_are_summed_up_until_their_first_token() {
    let a = endpoint(3, 1);
    let b = endpoint(4, 1);
    let mut ledger = InFlight::default();
    let mut long = ledger.admit_prompt(a, 10_240, 2_048);
    let mut cached = ledger.admit_prompt(a, 600, 0);
    let expected = PendingPrefills {
        prompts: 1,
        prompt_tokens: 10_840,
        uncached_tokens: 2_048,
        attention: 576,
    };
    assert_eq!(
        ledger.load(a).prefills,
        expected,
        "(10240^2 - 8192^2) / 65536"
    );
    assert_eq!(ledger.load(a).times(2).prefills, expected.with(expected));
    assert_eq!(expected.with(expected).without(expected), expected);
    assert_eq!(
        plain(cached.load()),
        load(1, 0, 0),
        "what one of them counts for"
    );
    ledger.transfer(&mut cached, b);
    ledger.first_token(&mut long, 10_240);
    assert_eq!(
        (
            ledger.load(a).prefills,
            ledger.load(b).prefills.prompt_tokens
        ),
        (NO_PREFILLS, 600)
    );
    ledger.release(long);
    ledger.release(cached);
    assert_eq!(ledger.rows().count(), 0);
    assert_eq!(
        PendingPrefills::from_tokens(100, 200),
        PendingPrefills::from_tokens(100, 100),
        "no more than there is"
    );
}

#[test]
fn the_load_of_others_is_seen_by_a_pick_but_is_not_ours() {
    let a = endpoint(3, 1);
    let mut ledger = InFlight::default();
    let ticket = ledger.admit(a, 100);
    ledger.others_mut().start(&[a]);
    ledger.others_mut().add(a, load(2, 30, 4));
    assert_eq!(
        (plain(ledger.load(a)), plain(ledger.own(a))),
        (load(3, 130, 4), load(1, 100, 0))
    );
    assert_eq!(rows(&ledger), [(a, load(1, 100, 0))]);
    ledger.release(ticket);
    assert_eq!(
        (plain(ledger.load(a)), ledger.rows().count()),
        (load(2, 30, 4), 0)
    );
    assert_eq!(load(2, 3, 4).times(3), load(6, 9, 12));
}

fn changed(ledger: &mut InFlight) -> Vec<(EndpointRef, EndpointLoad)> {
    let mut changed = Vec::new();
    ledger.take_changed(|endpoint, load| changed.push((endpoint, plain(load))));
    changed
}

#[test]
fn changed_rows_are_reported_once_with_their_current_load() {
    let a = endpoint(3, 1);
    let b = endpoint(9, 4);
    let mut ledger = InFlight::default();
    let mut one = ledger.admit(a, 10);
    let two = ledger.admit(a, 20);
    assert_eq!(changed(&mut ledger), [(a, load(2, 30, 0))]);
    assert_eq!(changed(&mut ledger), []);
    ledger.transfer(&mut one, b);
    ledger.decoded(&mut one, 5);
    assert_eq!(
        changed(&mut ledger),
        [(a, load(1, 20, 0)), (b, load(1, 10, 5))]
    );
    let third = ledger.admit(endpoint(3, 2), 7);
    ledger.release(two);
    assert_eq!(
        changed(&mut ledger),
        [(endpoint(3, 2), load(1, 7, 0))],
        "the row is of another generation now"
    );
    ledger.release(one);
    ledger.release(third);
    assert_eq!(
        changed(&mut ledger),
        [(b, load(0, 0, 0)), (endpoint(3, 2), load(0, 0, 0))]
    );
    for life in 3..6 {
        _ = ledger.admit(endpoint(3, life), 7);
    }
    assert_eq!(
        changed(&mut ledger),
        [(endpoint(3, 5), load(1, 7, 0))],
        "once, however many generations it had"
    );
}

#[test]
fn a_request_from_pick_to_end() {
    let a = endpoint(3, 1);
    let mut ledger = InFlight::default();
    let mut ticket = ledger.admit(a, 900);
    assert_eq!(plain(ledger.load(a)), load(1, 900, 0));
    ledger.first_token(&mut ticket, 1000);
    assert_eq!(plain(ledger.load(a)), load(1, 0, 1000));
    ledger.first_token(&mut ticket, 1000);
    assert_eq!(plain(ledger.load(a)), load(1, 0, 1000), "once");
    ledger.decoded(&mut ticket, 7);
    assert_eq!(plain(ledger.load(a)), load(1, 0, 1007));
    assert_eq!(rows(&ledger), [(a, load(1, 0, 1007))]);
    ledger.release(ticket);
    assert_eq!(plain(ledger.load(a)), EndpointLoad::default());
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn expected_output_counts_to_the_end() {
    let a = endpoint(3, 1);
    let b = endpoint(4, 1);
    let mut ledger = InFlight::default();
    let mut ticket = ledger.admit(a, 900);
    ledger.expect_output(&mut ticket, 50);
    assert_eq!(plain(ledger.load(a)), load(1, 950, 0));
    ledger.first_token(&mut ticket, 1000);
    assert_eq!(plain(ledger.load(a)), load(1, 50, 1000));
    ledger.transfer(&mut ticket, b);
    assert_eq!(
        (plain(ledger.load(a)), plain(ledger.load(b))),
        (EndpointLoad::default(), load(1, 50, 1000))
    );
    ledger.release(ticket);
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn a_retry_takes_all_of_it_along() {
    let a = endpoint(0, 1);
    let b = endpoint(9, 4);
    let mut ledger = InFlight::default();
    let mut one = ledger.admit(a, 10);
    let two = ledger.admit(a, 20);
    ledger.transfer(&mut one, b);
    assert_eq!(
        (plain(ledger.load(a)), plain(ledger.load(b))),
        (load(1, 20, 0), load(1, 10, 0))
    );
    ledger.first_token(&mut one, 30);
    ledger.transfer(&mut one, a);
    assert_eq!(
        (plain(ledger.load(a)), plain(ledger.load(b))),
        (load(2, 20, 30), load(0, 0, 0))
    );
    ledger.first_token(&mut one, 30);
    assert_eq!(
        plain(ledger.load(a)),
        load(2, 20, 30),
        "past its first token it stays, wherever it is served"
    );
    ledger.release(one);
    ledger.release(two);
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn a_new_generation_starts_clean() {
    let old = endpoint(5, 1);
    let new = endpoint(5, 2);
    let mut ledger = InFlight::default();
    let mut before = ledger.admit(old, 100);
    let after = ledger.admit(new, 1);
    assert_eq!(
        (plain(ledger.load(old)), plain(ledger.load(new))),
        (EndpointLoad::default(), load(1, 1, 0))
    );
    ledger.first_token(&mut before, 100);
    ledger.decoded(&mut before, 5);
    ledger.release(before);
    assert_eq!(
        plain(ledger.load(new)),
        load(1, 1, 0),
        "nothing of the old generation reaches the new"
    );
    ledger.release(after);
    assert_eq!(plain(ledger.load(new)), EndpointLoad::default());
}

#[test]
fn a_generation_that_comes_back_does_not_get_its_tickets_back() {
    let one = endpoint(5, 1);
    let two = endpoint(5, 2);
    let mut ledger = InFlight::default();
    let first = ledger.admit(one, 100);
    let second = ledger.admit(two, 10);
    let third = ledger.admit(one, 1);
    ledger.release(first);
    assert_eq!(plain(ledger.load(one)), load(1, 1, 0));
    ledger.release(second);
    ledger.release(third);
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn a_transfer_to_a_former_generation_does_not_reset_the_current_one() {
    let old = endpoint(5, 1);
    let new = endpoint(5, 2);
    let other = endpoint(0, 1);
    let mut ledger = InFlight::default();
    let present = ledger.admit(new, 10);
    let mut late = ledger.admit(other, 7);
    ledger.transfer(&mut late, old);
    assert_eq!(
        (
            plain(ledger.load(new)),
            plain(ledger.load(old)),
            plain(ledger.load(other))
        ),
        (
            load(1, 10, 0),
            EndpointLoad::default(),
            EndpointLoad::default()
        )
    );
    ledger.transfer(&mut late, other);
    assert_eq!(
        plain(ledger.load(other)),
        load(1, 7, 0),
        "it counts again where it can"
    );
    ledger.release(late);
    ledger.release(present);
    assert_eq!(ledger.rows().count(), 0);
}

#[test]
fn a_slot_out_of_range_is_counted_nowhere() {
    let far = endpoint(u16::MAX, 1);
    let mut ledger = InFlight::default();
    let mut ticket = ledger.admit(far, 10);
    ledger.first_token(&mut ticket, 10);
    assert_eq!(plain(ledger.load(far)), EndpointLoad::default());
    let last = endpoint(ENDPOINTS_MAX as u16 - 1, 1);
    ledger.transfer(&mut ticket, last);
    assert_eq!(plain(ledger.load(last)), load(1, 0, 10));
    ledger.release(ticket);
    assert_eq!(ledger.rows().count(), 0);
}

#[derive(Clone, Debug)]
enum LedgerOp {
    Admit(u16, u32),
    Restart(u16),
    FirstToken(prop::sample::Index, u32),
    Decoded(prop::sample::Index, u32),
    Transfer(prop::sample::Index, u16, bool),
    Release(prop::sample::Index),
}

const SLOTS: u16 = 4;

fn op() -> impl Strategy<Value = LedgerOp> {
    prop_oneof![
        4 => (0..SLOTS, 0..1000_u32).prop_map(|(slot, tokens)| LedgerOp::Admit(slot, tokens)),
        1 => (0..SLOTS).prop_map(LedgerOp::Restart),
        2 => (any::<prop::sample::Index>(), 0..1000_u32).prop_map(|(i, tokens)| LedgerOp::FirstToken(i, tokens)),
        2 => (any::<prop::sample::Index>(), 0..1000_u32).prop_map(|(i, tokens)| LedgerOp::Decoded(i, tokens)),
        2 => (any::<prop::sample::Index>(), 0..SLOTS, any::<bool>()).prop_map(|(i, slot, late)| LedgerOp::Transfer(i, slot, late)),
        3 => any::<prop::sample::Index>().prop_map(LedgerOp::Release),
    ]
}

/// A naive implementation for comparison: it sums the loads of all live tickets at each call.
/// `lives` has the current generation of each slot.
fn sums(
    live: &[(InFlightTicket, EndpointRef, EndpointLoad)],
    lives: &[u32],
) -> BTreeMap<EndpointRef, EndpointLoad> {
    let mut sums = BTreeMap::new();
    for (_, at, share) in live
        .iter()
        .filter(|(_, at, _)| at.generation.0 == lives[usize::from(at.slot.0)])
    {
        let sum: &mut EndpointLoad = sums.entry(*at).or_default();
        *sum = load(
            sum.requests + 1,
            sum.prefill_tokens + share.prefill_tokens,
            sum.decode_tokens + share.decode_tokens,
        );
    }
    sums
}

proptest! {
    /// Checks that after each sequence of operations, rows are the sums of the live tickets of
    /// current generations, and that all rows are zero in the end.
    #[test]
    fn rows_are_the_sum_of_live_tickets(ops in prop::collection::vec(op(), 0..120)) {
        let mut ledger = InFlight::default();
        let mut lives = vec![1_u32; usize::from(SLOTS)];
        let mut live: Vec<(InFlightTicket, EndpointRef, EndpointLoad)> = Vec::new();
        for op in ops {
            match op {
                LedgerOp::Admit(slot, tokens) => {
                    let at = endpoint(slot, lives[usize::from(slot)]);
                    live.push((ledger.admit(at, tokens), at, load(1, u64::from(tokens), 0)));
                }
                LedgerOp::Restart(slot) => {
                    lives[usize::from(slot)] += 1;
                    // The first request of a new generation makes the generation known to the
                    // ledger.
                    let at = endpoint(slot, lives[usize::from(slot)]);
                    live.push((ledger.admit(at, 0), at, load(1, 0, 0)));
                }
                LedgerOp::FirstToken(i, tokens) if !live.is_empty() => {
                    let (ticket, _, share) = i.get_mut(&mut live);
                    if !ticket.past_first_token {
                        *share = load(1, 0, share.decode_tokens + u64::from(tokens));
                    }
                    ledger.first_token(ticket, tokens);
                }
                LedgerOp::Decoded(i, tokens) if !live.is_empty() => {
                    let (ticket, _, share) = i.get_mut(&mut live);
                    share.decode_tokens += u64::from(tokens);
                    ledger.decoded(ticket, tokens);
                }
                LedgerOp::Transfer(i, slot, late) if !live.is_empty() => {
                    let (ticket, at, _) = i.get_mut(&mut live);
                    let present = lives[usize::from(slot)];
                    // The ticket moves to a former generation only if the current generation has
                    // load, because an empty row accepts every generation.
                    let busy = ledger.load(endpoint(slot, present)) != EndpointLoad::default() && *at != endpoint(slot, present);
                    *at = endpoint(slot, if late && busy && present > 1 { present - 1 } else { present });
                    ledger.transfer(ticket, *at);
                }
                LedgerOp::Release(i) if !live.is_empty() => {
                    let (ticket, _, _) = live.swap_remove(i.index(live.len()));
                    ledger.release(ticket);
                }
                _ => {}
            }
            prop_assert_eq!(rows(&ledger).into_iter().collect::<BTreeMap<_, _>>(), sums(&live, &lives));
        }
        for (ticket, _, _) in live {
            ledger.release(ticket);
        }
        prop_assert_eq!(ledger.rows().count(), 0);
    }
}
