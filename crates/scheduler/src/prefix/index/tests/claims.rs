//! Tests the rules for claims (blocks that no reply has confirmed, see `placing`): a claim counts
//! like a confirmed block, and changes nothing for confirmed blocks.

use super::*;
use crate::prefix::BlockClaim;

/// The number of blocks in each endpoint's cache.
const CAPACITY: u32 = 400;

const ENDPOINTS: u16 = 4;

/// An operation of a proxy, or of an attacker.
#[derive(Clone, Debug)]
enum Deed {
    /// The endpoint answered a prompt of this many blocks of the chain.
    Confirm(u16, u64, usize),
    /// A prompt of this many blocks of the chain was sent to the endpoint, and waits for its reply.
    Wait(u16, u64, usize),
    /// The endpoint refused a prompt of this many blocks, which no other prompt has.
    Refuse(u16, usize),
    /// A peer that exceeds its share reports a pick with this many blocks, which no prompt has.
    Lie(u16, usize),
    /// A peer reports that the endpoint refused a prompt of this many blocks of the chain.
    Deny(u16, u64, usize),
}

fn honest() -> impl Strategy<Value = Deed> {
    (0..ENDPOINTS, 0..30_u64, 1..100_usize).prop_map(|(at, of, len)| Deed::Confirm(at, of, len))
}

fn hostile() -> impl Strategy<Value = Deed> {
    let most = 2 * CAPACITY as usize;
    prop_oneof![
        (0..ENDPOINTS, 1..=most).prop_map(|(at, len)| Deed::Refuse(at, len)),
        (0..ENDPOINTS, 1..=most).prop_map(|(at, len)| Deed::Lie(at, len)),
        (0..ENDPOINTS, 0..30_u64, 1..100_usize).prop_map(|(at, of, len)| Deed::Deny(at, of, len)),
        (0..ENDPOINTS, 100..130_u64, 1..100_usize)
            .prop_map(|(at, of, len)| Deed::Wait(at, of, len)),
    ]
}

fn index_of(entries: usize) -> PrefixIndex {
    let mut index = PrefixIndex::with_capacity(entries);
    (0..ENDPOINTS).for_each(|at| index.set_capacity(endpoint(at), CAPACITY));
    index
}

fn apply(index: &mut PrefixIndex, deed: &Deed, number: u64) {
    let alien = |len| chain(1_000_000 + number, len);
    match *deed {
        Deed::Confirm(at, of, len) => {
            let blocks = &chain(of, 100)[..len];
            index.claim(endpoint(at), blocks, BlockClaim::Unconfirmed);
            index.record(endpoint(at), blocks);
        }
        Deed::Wait(at, of, len) => {
            index.claim(
                endpoint(at),
                &chain(of, 100)[..len],
                BlockClaim::Unconfirmed,
            );
        }
        Deed::Refuse(at, len) => {
            index.claim(endpoint(at), &alien(len), BlockClaim::Unconfirmed);
            index.withdraw(endpoint(at), &alien(len));
        }
        Deed::Lie(at, len) => index.claim(endpoint(at), &alien(len), BlockClaim::OverShare),
        Deed::Deny(at, of, len) => index.withdraw(endpoint(at), &chain(of, 100)[..len]),
    }
}

/// Returns the number of blocks of each chain that the index estimates to be cached at each
/// endpoint.
fn knows(index: &PrefixIndex, chains: std::ops::Range<u64>) -> Vec<MatchLength> {
    let all: Vec<EndpointRef> = (0..ENDPOINTS).map(endpoint).collect();
    let mut known = Vec::new();
    chains
        .flat_map(|of| {
            index.matched(&chain(of, 100), &all, &mut known);
            known.clone()
        })
        .collect()
}

proptest! {
    /// Checks that the index has the same estimate for answered prompts with and without refused
    /// prompts, false reports and false withdrawals.
    #[test]
    fn what_nobody_confirmed_moves_nothing(
        deeds in prop::collection::vec(prop_oneof![honest(), hostile()], 0..150),
    ) {
        let mut attacked = index_of(200_000);
        let mut alone = index_of(200_000);
        for (number, deed) in (0..).zip(&deeds) {
            apply(&mut attacked, deed, number);
            if matches!(deed, Deed::Confirm(..)) {
                apply(&mut alone, deed, number);
            }
        }
        prop_assert!(knows(&attacked, 0..30) == knows(&alone, 0..30));
        for at in 0..ENDPOINTS {
            for of in 0..30 {
                let block = chain(of, 100)[0];
                prop_assert_eq!(attacked.reuse(endpoint(at), block), alone.reuse(endpoint(at), block));
            }
        }
    }

    /// Checks that no claim replaces a confirmed block that is, or may be, cached, even if the
    /// table is too small.
    #[test]
    fn in_a_full_table_a_claim_replaces_no_confirmed_block(
        deeds in prop::collection::vec(honest(), 0..60),
        claims in prop::collection::vec(hostile(), 0..60),
    ) {
        let mut index = index_of(1_000);
        deeds.iter().for_each(|deed| apply(&mut index, deed, 0));
        let before = knows(&index, 0..30);
        (0..).zip(&claims).for_each(|(number, deed)| apply(&mut index, deed, number));
        prop_assert!(knows(&index, 0..30) == before);
    }

    /// Checks that a claim counts immediately, and that the withdrawal of the claim restores the
    /// state before it, also for prompts that wait for a reply.
    #[test]
    fn a_withdrawal_restores_what_was(
        deeds in prop::collection::vec(honest(), 0..60),
        waiting in 0..100_usize,
        at in 0..ENDPOINTS, of in 0..101_u64, len in 1..100_usize,
    ) {
        let mut index = index_of(200_000);
        deeds.iter().for_each(|deed| apply(&mut index, deed, 0));
        apply(&mut index, &Deed::Wait(at, 100, waiting), 0);
        let before = knows(&index, 0..101);
        let entries = index.stats().entries;
        let prompt = &chain(of, 100)[..len];
        let known = stale(&index, prompt, endpoint(at));
        let estimate = index.place(endpoint(at), prompt, known);
        prop_assert!(length(&index, prompt, endpoint(at)) >= len as u32);
        index.withdraw(endpoint(at), estimate.new_hashes(prompt));
        prop_assert!(knows(&index, 0..101) == before);
        prop_assert_eq!(index.stats().entries, entries);
    }
}

#[test]
fn a_prompt_that_fits_no_cache_is_not_recorded() {
    let mut index = index_of(100_000);
    let long = chain(1, 2 * CAPACITY as usize + 1);
    index.place(endpoint(0), &long, MatchLength::default());
    index.record(endpoint(0), &long);
    assert_eq!(index.stats().entries, 0);
    index.record(endpoint(0), &long[1..]);
    assert_eq!(index.stats().entries, long.len() - 1);
}

#[test]
fn claims_of_an_endpoint_beyond_its_capacity_replace_its_own_oldest() {
    let mut index = index_of(100_000);
    for seed in 0..40 {
        index.claim(endpoint(0), &chain(seed, 100), BlockClaim::OverShare);
    }
    let found: Vec<u32> = (0..40)
        .map(|seed| length(&index, &chain(seed, 100), endpoint(0)))
        .collect();
    assert!(found[..35].iter().all(|&found| found == 0), "{found:?}");
    assert!(found[38..].iter().all(|&found| found == 100), "{found:?}");
}

#[test]
fn a_peer_withdraws_no_block_that_another_proxy_has_claimed_too() {
    let mut index = index_of(100_000);
    let known = |index: &PrefixIndex| length(index, &chain(1, 100), endpoint(0));
    let claim = |index: &mut PrefixIndex, len: usize| {
        let blocks = &chain(1, 100)[..len];
        index.claim(endpoint(0), blocks, BlockClaim::Unconfirmed);
    };
    claim(&mut index, 60);
    // A hostile peer copies the claim, and withdraws it as often as it has made it.
    for len in [60, 61, 100] {
        claim(&mut index, len);
    }
    for len in [60, 61, 100] {
        index.withdraw_of_peer(endpoint(0), &chain(1, 100)[..len]);
    }
    assert_eq!(known(&index), 61, "the last 39 blocks were claimed once");
    index.withdraw(endpoint(0), &chain(1, 100));
    assert_eq!(known(&index), 0);
}

#[test]
fn claims_that_nobody_withdraws_are_dropped_when_they_are_old() {
    let mut index = index_of(8_000);
    index.claim(endpoint(0), &chain(1, 100), BlockClaim::Unconfirmed);
    for seed in 0..1_000 {
        index.claim(endpoint(1), &chain(2 + seed, 100), BlockClaim::OverShare);
    }
    let block = chain(1, 1)[0];
    let owner = index.owners.get(endpoint(0)).unwrap();
    let key = index.table.key(block, region(owner));
    assert!(index.table.find(key, owner, EntryClass::Claimed).is_none());
    assert_eq!(index.stats().entries, count(&mut index));
}

#[test]
fn a_burst_of_one_prefix_is_requested_often_before_the_first_reply() {
    let mut index = index_of(100_000);
    let prompt = chain(1, 16);
    let interval = |index: &PrefixIndex| {
        let known = [stale(index, &prompt, endpoint(0))];
        index.reuse_interval(&prompt, &[endpoint(0)], &known)
    };
    index.claim(endpoint(0), &prompt, BlockClaim::Unconfirmed);
    assert_eq!(interval(&index), REQUESTED_ONCE);
    index.claim(endpoint(0), &prompt, BlockClaim::Unconfirmed);
    let often = interval(&index);
    assert!(often < 1.0, "{often}");
    index.record(endpoint(0), &prompt);
    assert_eq!(interval(&index), often);
}
