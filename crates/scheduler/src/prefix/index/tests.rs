use super::*;
use crate::endpoint::{ENDPOINTS_MAX, Generation, Slot};
use crate::prefix::BLOCKS_MAX;
use crate::rng::Rng;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

mod claims;

fn endpoint(slot: u16) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(1),
    }
}

fn next_generation(endpoint: EndpointRef) -> EndpointRef {
    EndpointRef {
        generation: Generation(endpoint.generation.0 + 1),
        ..endpoint
    }
}

fn chain(seed: u64, count: usize) -> Vec<u64> {
    let mut rng = Rng::seeded(seed);
    (0..count).map(|_| rng.next_u64() << 1).collect()
}

fn matched(index: &PrefixIndex, blocks: &[u64], endpoints: &[EndpointRef]) -> Vec<u32> {
    let mut out = vec![
        MatchLength {
            cached: 7,
            maybe_cached: 7
        };
        3
    ];
    index.matched(blocks, endpoints, &mut out);
    out.into_iter().map(|known| known.cached).collect()
}

fn stale(index: &PrefixIndex, blocks: &[u64], endpoint: EndpointRef) -> MatchLength {
    let mut out = Vec::new();
    index.matched(blocks, &[endpoint], &mut out);
    out[0]
}

fn length(index: &PrefixIndex, blocks: &[u64], endpoint: EndpointRef) -> u32 {
    matched(index, blocks, &[endpoint])[0]
}

/// Counts the entries of live owners one by one.
fn count(index: &mut PrefixIndex) -> usize {
    let mut count = 0;
    for bucket in 0..index.table.buckets() {
        index.table.retain(bucket, |entry| {
            count += usize::from(index.owners.is_live(entry.owner));
            true
        });
    }
    count
}

#[test]
fn each_endpoint_reaches_as_far_as_it_was_given() {
    let mut index = PrefixIndex::with_capacity(10_000);
    let a = endpoint(0);
    let b = endpoint(700);
    let c = endpoint(ENDPOINTS_MAX as u16 - 1);
    let never = endpoint(4);
    let common = chain(1, 300);
    let branch = [&common[..120], &chain(2, 80)].concat();
    index.record(a, &common);
    index.record(b, &common[..1]);
    index.record(c, &branch);
    assert_eq!(
        matched(&index, &common, &[never, c, b, a, c]),
        [0, 120, 1, 300, 120]
    );
    assert_eq!(matched(&index, &branch, &[a, b, c]), [120, 1, 200]);
    assert_eq!(matched(&index, &common[..50], &[a, b, c]), [50, 1, 50]);
    assert_eq!(matched(&index, &chain(3, 50), &[a, b, c]), [0, 0, 0]);
    assert_eq!(matched(&index, &[], &[a, b]), [0, 0]);
    assert_eq!(matched(&index, &common, &[]), [0_u32; 0]);
}

#[test]
fn every_length_of_every_chain_is_found() {
    for count in 1..40 {
        let mut index = PrefixIndex::with_capacity(40_000);
        let blocks = chain(1, count);
        let all: Vec<EndpointRef> = (0..=count as u16).map(endpoint).collect();
        for (held, &endpoint) in all.iter().enumerate() {
            index.record(endpoint, &blocks[..held]);
        }
        assert_eq!(
            matched(&index, &blocks, &all),
            (0..=count as u32).collect::<Vec<_>>()
        );
    }
}

#[test]
fn a_thousand_endpoints_can_hold_the_same() {
    let mut index = PrefixIndex::with_capacity(400_000);
    let blocks = chain(1, 20);
    let all: Vec<EndpointRef> = (0..ENDPOINTS_MAX as u16).map(endpoint).collect();
    for &endpoint in &all {
        index.record(endpoint, &blocks);
    }
    assert_eq!(matched(&index, &blocks, &all), vec![20; ENDPOINTS_MAX]);
    assert_eq!(index.stats().owners, ENDPOINTS_MAX);
}

#[test]
fn without_room_it_remembers_nothing() {
    let mut index = PrefixIndex::with_capacity(0);
    index.set_capacity(endpoint(1), 10);
    index.record(endpoint(1), &chain(1, 10));
    index.forget(endpoint(1));
    assert_eq!(
        matched(&index, &chain(1, 10), &[endpoint(1), endpoint(2)]),
        [0, 0]
    );
    assert!(index.sweep(100));
    assert_eq!(index.stats(), PrefixStats::default());
}

/// An engine with a least-recently-used cache, which reports how much of a prompt it had cached.
struct LruEngine {
    capacity: usize,
    used: Vec<u64>,
}

impl LruEngine {
    fn serve(&mut self, blocks: &[u64]) -> u32 {
        let held = blocks
            .iter()
            .take_while(|block| self.used.contains(block))
            .count();
        self.used.retain(|block| !blocks.contains(block));
        // The blocks are used in reverse order, so that this engine evicts the end of a chain
        // before its beginning, as real engines do.
        self.used.extend(blocks.iter().rev());
        let over = self.used.len().saturating_sub(self.capacity);
        self.used.drain(..over);
        held as u32
    }
}

/// Sends requests for chains that are drawn with uneven frequency. Returns the mean error of the
/// estimate over the last half of the requests, in blocks per request, and the final capacity.
fn follow(nominal: u32, engine: usize, learning: bool) -> (f64, u32) {
    let mut index = PrefixIndex::with_capacity(100_000);
    let a = endpoint(0);
    let mut rng = Rng::seeded(5);
    let mut engine = LruEngine {
        capacity: engine,
        used: Vec::new(),
    };
    let chains: Vec<Vec<u64>> = (0..60).map(|seed| chain(seed, 40)).collect();
    let mut off = 0;
    let mut counted = 0;
    for request in 0..1_500 {
        let pick = rng.below(60).min(rng.below(60));
        let blocks = &chains[pick];
        index.set_capacity(a, nominal);
        let believed = length(&index, blocks, a);
        let reuse = believed
            .checked_sub(1)
            .and_then(|last| index.reuse(a, blocks[last as usize]));
        index.record(a, blocks);
        let held = engine.serve(blocks);
        if learning {
            match reuse {
                Some(reuse) if held <= believed => index.learn(a, reuse, held == believed),
                _ if held > believed => index.learn_more(a),
                _ => {}
            }
        }
        if request >= 750 {
            off += u64::from(believed.abs_diff(held));
            counted += 1;
        }
    }
    (off as f64 / f64::from(counted), index.capacity(a).unwrap())
}

#[test]
fn the_real_capacity_is_learned_from_both_sides() {
    for (nominal, real) in [(1_600, 800), (1_000, 500), (600, 1_000), (500, 800)] {
        let (before, stays) = follow(nominal, real, false);
        let (after, learned) = follow(nominal, real, true);
        assert_eq!(stays, nominal);
        assert!(
            after < before / 2.0,
            "{nominal} for {real}: off by {before:.1} blocks a request, then {after:.1}"
        );
        assert!(
            (real as f64 * 0.7..real as f64 * 1.5).contains(&f64::from(learned)),
            "{nominal} for {real}: {learned}"
        );
    }
}

#[test]
fn what_cannot_have_been_evicted_teaches_nothing() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let a = endpoint(0);
    index.set_capacity(a, 1_000);
    for seed in 0..30 {
        index.record(a, &chain(seed, 40));
    }
    let newest = index.reuse(a, chain(29, 40)[39]).unwrap();
    assert!(newest.at_least == 0 && newest.at_most < 1_000, "{newest:?}");
    index.learn(
        a,
        ReuseDistance {
            at_least: 0,
            at_most: 40,
        },
        false,
    );
    assert_eq!(
        index.capacity(a),
        Some(1_000),
        "its prefill is not done yet"
    );
    index.learn(
        a,
        ReuseDistance {
            at_least: 300,
            at_most: 400,
        },
        false,
    );
    assert_eq!(index.capacity(a), Some(875), "by an eighth at most");
    index.set_capacity(a, 1_000);
    assert_eq!(
        index.capacity(a),
        Some(875),
        "the same nominal capacity again does not undo what was learned"
    );
    index.set_capacity(a, 2_000);
    assert_eq!(
        index.capacity(a),
        Some(2_000),
        "another engine configuration does"
    );
    for _ in 0..50 {
        index.learn_more(a);
    }
    assert_eq!(index.capacity(a), Some(4_000));
    let unknown = endpoint(1);
    index.learn_more(unknown);
    index.learn(unknown, newest, false);
    assert_eq!(
        (index.capacity(unknown), index.reuse(unknown, 1)),
        (None, None)
    );
}

#[test]
fn a_hit_beyond_the_estimated_capacity_raises_it_by_an_eighth() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let a = endpoint(0);
    index.set_capacity(a, 800);
    let there = |index: &mut PrefixIndex, at_least| {
        index.learn(
            a,
            ReuseDistance {
                at_least,
                at_most: at_least + 50,
            },
            true,
        );
        index.capacity(a)
    };
    assert_eq!(
        there(&mut index, 699),
        Some(800),
        "more than an eighth of it younger: nothing new"
    );
    assert_eq!(there(&mut index, 700), Some(900));
    assert_eq!(there(&mut index, 788), Some(1_012));
}

#[test]
fn it_says_what_memory_it_holds() {
    assert_eq!(PrefixIndex::with_capacity(0).bytes(), 0);
    let small = PrefixIndex::with_capacity(8_000).bytes();
    let large = PrefixIndex::with_capacity(16_000).bytes();
    assert_eq!(
        large - small,
        1_000 * 64,
        "a bucket of eight entries takes a cache line"
    );
    let owners = small - 1_000 * 64;
    assert_eq!(
        owners, 1_122_368,
        "of all endpoints there may be, and what aligns the buckets"
    );
    assert!(format!("{:?}", PrefixIndex::with_capacity(0)).contains("entries"));
}

#[test]
fn a_slot_no_snapshot_has_is_not_remembered() {
    let mut index = PrefixIndex::with_capacity(1000);
    let far = endpoint(ENDPOINTS_MAX as u16);
    index.record(far, &chain(1, 10));
    assert_eq!(
        (length(&index, &chain(1, 10), far), index.stats().entries),
        (0, 0)
    );
}

#[test]
fn the_forgotten_are_gone_at_once_and_swept_in_slices() {
    let mut index = PrefixIndex::with_capacity(8000);
    let a = endpoint(1);
    let b = endpoint(2);
    let blocks = chain(1, 100);
    index.record(a, &blocks);
    index.record(b, &blocks);
    index.forget(next_generation(a));
    assert_eq!(
        matched(&index, &blocks, &[a, b]),
        [100, 100],
        "another generation was meant"
    );
    index.forget(a);
    assert_eq!(matched(&index, &blocks, &[a, b]), [0, 100]);
    assert_eq!((index.stats().entries, index.stats().retired), (100, 1));
    let mut slices = 1;
    while !index.sweep(100) {
        slices += 1;
    }
    assert_eq!(slices, 10, "a thousand buckets");
    assert_eq!((index.stats().entries, index.stats().retired), (100, 0));
    index.record(a, &blocks[..5]);
    assert_eq!(matched(&index, &blocks, &[a, b]), [5, 100]);
}

#[test]
fn a_new_generation_starts_clean() {
    let mut index = PrefixIndex::with_capacity(8000);
    let old = endpoint(1);
    let blocks = chain(1, 100);
    let new = next_generation(old);
    index.record(old, &blocks);
    assert_eq!(matched(&index, &blocks, &[old, new]), [100, 0]);
    index.record(new, &blocks[..3]);
    assert_eq!(matched(&index, &blocks, &[old, new]), [0, 3]);
    index.record(old, &blocks[..1]);
    assert_eq!(
        matched(&index, &blocks, &[old, new]),
        [1, 0],
        "a generation that comes back does not get its entries back"
    );
}

#[test]
fn generations_may_change_faster_than_sweeps() {
    let mut index = PrefixIndex::with_capacity(8000);
    let neighbour = endpoint(9);
    let blocks = chain(1, 10);
    index.record(neighbour, &blocks);
    let mut life = endpoint(1);
    for _ in 0..3 * crate::prefix::owners::OWNERS_MAX {
        let next = next_generation(life);
        index.record(next, &blocks[..4]);
        assert_eq!(matched(&index, &blocks, &[life, next]), [0, 4]);
        life = next;
    }
    assert_eq!(matched(&index, &blocks, &[neighbour, life]), [10, 4]);
    assert_eq!(index.stats().entries, 14);
}

#[test]
fn a_hole_does_not_cut_the_match() {
    let a = endpoint(3);
    let blocks = chain(1, 257);
    for count in [2, 3, 10, 64, 257] {
        let blocks = &blocks[..count];
        for hole in 1..count - 1 {
            let mut index = PrefixIndex::with_capacity(4000);
            index.record(a, blocks);
            let owner = index.owners.get(a).unwrap();
            let key = index.table.key(blocks[hole], region(owner));
            let (place, _) = index.table.find(key, owner, EntryClass::Confirmed).unwrap();
            index.table.free(place);
            assert_eq!(
                length(&index, blocks, a),
                count as u32,
                "block {hole} of {count} lost"
            );
            let longer = [blocks, &chain(2, 100)].concat();
            assert_eq!(
                length(&index, &longer, a),
                count as u32,
                "block {hole} of {count} lost, asked for more"
            );
        }
    }
}

#[test]
fn a_hole_in_maybe_cached_blocks_does_not_cut_them_either() {
    let a = endpoint(3);
    let common = chain(1, 120);
    for (shared, hole) in [(40, 20), (40, 39), (40, 40), (40, 80), (1, 60), (119, 60)] {
        let mut index = PrefixIndex::with_capacity(20_000);
        index.set_capacity(a, 1_000);
        index.record(a, &common);
        (2..14).for_each(|seed| index.record(a, &chain(seed, 100)));
        index.record(a, &common[..shared]);
        let owner = index.owners.get(a).unwrap();
        let (place, _) = index
            .table
            .find(
                index.table.key(common[hole], region(owner)),
                owner,
                EntryClass::Confirmed,
            )
            .unwrap();
        index.table.free(place);
        let held = if hole + 1 == shared {
            shared - 1
        } else {
            shared
        };
        assert_eq!(
            stale(&index, &common, a),
            MatchLength {
                cached: held as u32,
                maybe_cached: 120
            },
            "{shared} held, block {hole} lost"
        );
    }
}

#[test]
fn a_first_block_that_had_to_go_does_not_hide_the_others() {
    let mut index = PrefixIndex::with_capacity(LANES);
    let a = endpoint(3);
    let blocks = chain(1, LANES);
    index.record(a, &blocks);
    let owner = index.owners.get(a).unwrap();
    let (place, _) = index
        .table
        .find(
            index.table.key(blocks[0], region(owner)),
            owner,
            EntryClass::Confirmed,
        )
        .unwrap();
    index.table.free(place);
    assert_eq!(length(&index, &blocks, a), LANES as u32);
}

#[test]
fn in_a_table_that_loses_most_entries_a_look_up_takes_bounded_time() {
    let mut index = PrefixIndex::with_capacity(4096);
    let long = chain(1, BLOCKS_MAX);
    index.record(endpoint(0), &long);
    assert!(index.stats().entries <= 4096);
    let believed = length(&index, &long, endpoint(0));
    assert!(believed <= BLOCKS_MAX as u32);
    assert_eq!(
        index.stats().evictions as usize,
        BLOCKS_MAX - index.stats().entries
    );
}

#[test]
fn the_oldest_go_first() {
    let mut index = PrefixIndex::with_capacity(8192);
    let chains: Vec<Vec<u64>> = (0..40).map(|seed| chain(seed, 400)).collect();
    for blocks in &chains {
        index.record(endpoint(0), blocks);
    }
    let held: Vec<u32> = chains
        .iter()
        .map(|blocks| {
            blocks
                .iter()
                .map(|&b| length(&index, &[b], endpoint(0)))
                .sum()
        })
        .collect();
    assert!(
        held[..12].iter().all(|&held| held < 20),
        "of 40 chains 20 fit; the oldest are gone: {held:?}"
    );
    assert!(
        held[28..].iter().all(|&held| held > 390),
        "the newest are there: {held:?}"
    );
    assert!(
        chains[28..]
            .iter()
            .all(|blocks| length(&index, blocks, endpoint(0)) >= 399),
        "and match as a whole"
    );
}

#[test]
fn beyond_its_capacity_an_endpoint_holds_the_most_recently_touched() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let small = endpoint(0);
    let large = endpoint(1);
    index.set_capacity(small, 1000);
    let chains: Vec<Vec<u64>> = (0..40).map(|seed| chain(seed, 100)).collect();
    for blocks in &chains {
        index.record(small, blocks);
        index.record(large, blocks);
        index.record(small, &chains[0]);
    }
    let reach = |index: &PrefixIndex, of| {
        chains
            .iter()
            .map(|blocks| length(index, blocks, of))
            .collect::<Vec<_>>()
    };
    assert_eq!(reach(&index, large), vec![100; 40], "it has room for all");
    let held = reach(&index, small);
    assert_eq!(held[0], 100, "touched again and again: {held:?}");
    assert!(
        held[1..30].iter().all(|&held| held == 0),
        "long evicted: {held:?}"
    );
    assert!(
        (700..=1000).contains(&held.iter().sum::<u32>()),
        "seven to eight eighths of the capacity, less an epoch: {held:?}"
    );
    assert!(held[34..].iter().all(|&held| held == 100), "{held:?}");

    index.set_capacity(small, 0);
    assert_eq!(reach(&index, small), vec![0; 40]);
    index.set_capacity(small, u32::MAX);
    assert_eq!(
        reach(&index, small),
        vec![100; 40],
        "nothing was thrown away"
    );
}

#[test]
fn blocks_given_one_to_two_capacities_ago_count_half() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let a = endpoint(0);
    index.set_capacity(a, 1_000);
    let chains: Vec<Vec<u64>> = (0..100).map(|seed| chain(seed, 100)).collect();
    for blocks in &chains {
        index.record(a, blocks);
    }
    let found: Vec<MatchLength> = chains
        .iter()
        .map(|blocks| stale(&index, blocks, a))
        .collect();
    assert!(
        found[..78]
            .iter()
            .all(|&found| found == MatchLength::default()),
        "gone: {found:?}"
    );
    let (held, may_hold) = found.iter().fold((0, 0), |(held, all), found| {
        (held + found.cached, all + found.maybe_cached)
    });
    assert!(
        (800..=1_000).contains(&held) && (1_900..=2_300).contains(&may_hold),
        "{held} of 1,000, and {may_hold}"
    );
    assert!(
        found[82..89].iter().all(|&found| found
            == MatchLength {
                cached: 0,
                maybe_cached: 100
            }),
        "{found:?}"
    );
    assert_eq!(
        MatchLength {
            cached: 40,
            maybe_cached: 100
        }
        .blocks(&chains[0]),
        70
    );
    let old = index.reuse(a, chains[85][99]).unwrap();
    index.learn(a, old, false);
    assert_eq!(index.capacity(a), Some(1_000), "a miss was to be expected");
    index.learn(a, old, true);
    assert_eq!(index.capacity(a), Some(1_125), "a hit was not");
    let may_hold: u32 = chains
        .iter()
        .map(|blocks| stale(&index, blocks, a).maybe_cached)
        .sum();
    assert!(
        may_hold <= 2_300,
        "a larger capacity brings back nothing that was given up: {may_hold}"
    );
}

#[test]
fn maybe_cached_blocks_begin_where_cached_ones_end() {
    let common = chain(1, 300);
    for shared in [1, 2, 57, 150, 298, 299] {
        let mut index = PrefixIndex::with_capacity(100_000);
        let a = endpoint(0);
        index.set_capacity(a, 1_000);
        index.record(a, &common);
        (2..14).for_each(|seed| index.record(a, &chain(seed, 100)));
        index.record(a, &common[..shared]);
        let longer = [&common[..], &chain(20, 50)].concat();
        for blocks in [&common, &longer] {
            assert_eq!(
                stale(&index, blocks, a),
                MatchLength {
                    cached: shared as u32,
                    maybe_cached: 300
                }
            );
        }
    }
}

#[test]
fn a_table_far_larger_than_a_cache_still_knows_what_is_evicted() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let a = endpoint(0);
    index.set_capacity(a, 1_000);
    let chains: Vec<Vec<u64>> = (0..400).map(|seed| chain(seed, 100)).collect();
    for blocks in &chains {
        index.record(a, blocks);
    }
    let held: u32 = chains.iter().map(|blocks| length(&index, blocks, a)).sum();
    assert!(
        (800..=1_000).contains(&held),
        "of 40,000 blocks {held} are believed to be there"
    );
}

/// Returns the reuse interval of a prompt of sixteen blocks in a pool of four endpoints.
fn reuse_interval(index: &PrefixIndex, asked: &[u64]) -> f32 {
    let endpoints: Vec<_> = (0..4).map(endpoint).collect();
    let mut known = Vec::new();
    index.matched(asked, &endpoints, &mut known);
    index.reuse_interval(asked, &endpoints, &known)
}

#[test]
fn a_prefix_requested_once_has_the_longest_reuse_interval() {
    let mut index = PrefixIndex::with_capacity(131_072);
    let asked = chain(1, 16);
    assert_eq!(
        reuse_interval(&index, &asked),
        REQUESTED_ONCE,
        "no endpoint has any of it"
    );
    index.record(endpoint(2), &asked);
    assert_eq!(reuse_interval(&index, &asked), REQUESTED_ONCE);
    let longer = [&asked[..], &chain(2, 8)].concat();
    index.record(endpoint(2), &longer);
    assert_eq!(
        reuse_interval(&index, &longer),
        REQUESTED_ONCE,
        "its beginning was requested twice, all of it once"
    );
    assert!(reuse_interval(&index, &asked) <= 0.5);
    assert_eq!(
        index.reuse_interval(&[], &[endpoint(0)], &[]),
        REQUESTED_ONCE
    );
    assert_eq!(index.reuse_interval(&asked, &[], &[]), REQUESTED_ONCE);
}

#[test]
fn the_reuse_interval_follows_how_often_a_prefix_is_requested() {
    let mut index = PrefixIndex::with_capacity(131_072);
    let asked = chain(1, 16);
    let mut others = (2..).map(|seed| chain(seed, 16));
    let mut requested = |index: &mut PrefixIndex, prompts_between: usize| {
        others
            .by_ref()
            .take(prompts_between)
            .enumerate()
            .for_each(|(number, other)| index.record(endpoint(number as u16 % 4), &other));
        index.record(endpoint(2), &asked);
        reuse_interval(index, &asked)
    };
    requested(&mut index, 0);
    // Between two requests for the prompt, 39 other prompts are sent to the four endpoints. So each
    // endpoint gets ten prompts from one request for the prompt to the next.
    for _ in 0..4 {
        let interval = requested(&mut index, 39);
        assert!((7.0..14.0).contains(&interval), "{interval}");
    }
    let once_sooner = requested(&mut index, 1);
    assert!(
        (4.0..14.0).contains(&once_sooner),
        "one request by chance says little: {once_sooner}"
    );
    let often = (0..8).map(|_| requested(&mut index, 3)).last().unwrap();
    assert!((0.5..2.0).contains(&often), "{often}");
    (100..180).for_each(|seed| index.record(endpoint(seed as u16 % 4), &chain(seed, 16)));
    let waited = reuse_interval(&index, &asked);
    assert!(
        (20.0..20.5).contains(&waited),
        "no longer requested: {waited}"
    );
}

#[test]
fn what_stands_for_four_blocks_takes_the_room_of_four() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let few = endpoint(0);
    let many = endpoint(1);
    let chains: Vec<Vec<u64>> = (0..40).map(|seed| chain(seed, 100)).collect();
    let wide = |blocks: &[u64]| blocks.iter().map(|block| block | 1).collect::<Vec<_>>();
    index.set_capacity(few, 1000);
    index.set_capacity(many, 4000);
    for blocks in &chains {
        index.record(few, blocks);
        index.record(many, &wide(blocks));
    }
    let held = |of, chains: &[Vec<u64>]| {
        chains
            .iter()
            .map(|blocks| length(&index, blocks, of))
            .collect::<Vec<_>>()
    };
    let theirs = held(
        many,
        &chains.iter().map(|blocks| wide(blocks)).collect::<Vec<_>>(),
    );
    assert_eq!(
        (theirs.iter().sum::<u32>() / 100, theirs),
        (
            held(few, &chains).iter().sum::<u32>() / 100,
            held(few, &chains)
        )
    );
    assert_eq!((index.stats().entries, count(&mut index)), (8_000, 8_000));
    let reuse = index.reuse(many, chains[38][99] | 1).unwrap();
    assert_eq!(
        (index.stats().entries, reuse.at_most % 4),
        (8_000, 0),
        "{reuse:?}"
    );
}

#[test]
fn a_working_set_within_the_capacity_stays_however_often_it_is_touched() {
    let mut index = PrefixIndex::with_capacity(100_000);
    index.set_capacity(endpoint(0), 1000);
    let chains: Vec<Vec<u64>> = (0..8).map(|seed| chain(seed, 100)).collect();
    for blocks in &chains {
        index.record(endpoint(0), blocks);
    }
    for turn in 0..500 {
        index.record(endpoint(0), &chains[turn % 7]);
    }
    assert_eq!(
        length(&index, &chains[7], endpoint(0)),
        100,
        "idle for 50,000 touches, but nothing needed its room"
    );
}

#[test]
fn a_capacity_learnt_late_does_not_empty_the_endpoint() {
    let mut index = PrefixIndex::with_capacity(100_000);
    let chains: Vec<Vec<u64>> = (0..30).map(|seed| chain(seed, 100)).collect();
    for blocks in &chains {
        index.record(endpoint(0), blocks);
    }
    index.set_capacity(endpoint(0), 1000);
    assert_eq!(length(&index, &chains[29], endpoint(0)), 100);
    for blocks in &chains {
        index.record(endpoint(0), blocks);
    }
    let held: u32 = chains
        .iter()
        .map(|blocks| length(&index, blocks, endpoint(0)))
        .sum();
    assert!((800..=1000).contains(&held), "{held}");
}

#[test]
fn an_old_entry_never_looks_young() {
    // The table is so small that an epoch is one touch. So stamps wrap after 65,536 touches.
    let mut index = PrefixIndex::with_capacity(512);
    let idle = chain(1, 20);
    let busy = chain(2, 50);
    index.record(endpoint(0), &idle);
    let mut held = 20;
    for _ in 0..5000 {
        index.record(endpoint(1), &busy);
        let now = length(&index, &idle, endpoint(0));
        assert!(now <= held, "{now} after {held}");
        held = now;
        assert_eq!(length(&index, &busy, endpoint(1)), 50);
    }
    assert_eq!((held, index.stats().entries), (0, 50));
}

#[test]
fn few_are_lost_at_the_load_it_is_made_for() {
    let mut index = PrefixIndex::with_capacity(ENTRIES_DEFAULT);
    for slot in 0..100 {
        index.record(endpoint(slot), &chain(u64::from(slot), 6600));
    }
    let lost = 660_000 - count(&mut index);
    assert!(
        lost < 3300,
        "{lost} of 660,000, all distinct: more than half a percent"
    );
    assert_eq!(index.stats().evictions as usize, lost);
    assert!(index.bytes() < 16_000_000);
}

/// All endpoints hold the same blocks, so eight entries of a block lie together, and pairs of
/// buckets overflow sooner. Entries that the table loses are holes.
#[test]
fn little_is_lost_where_all_endpoints_hold_the_same() {
    let mut index = PrefixIndex::with_capacity(ENTRIES_DEFAULT);
    let blocks = chain(1, 6600);
    let all = (0..100).map(endpoint).collect::<Vec<_>>();
    for &endpoint in &all {
        index.record(endpoint, &blocks);
    }
    let lost = 660_000 - count(&mut index);
    assert!(lost < 660_000 / 15, "{lost} of 660,000");
    let reached = matched(&index, &blocks, &all);
    assert!(reached.iter().all(|&reached| reached > 6590), "{reached:?}");
}

#[derive(Clone, Debug)]
enum IndexOp {
    Record(u16, usize, usize),
    Forget(u16),
    Restart(u16),
    Capacity(u16, u32),
    Sweep(usize),
}

const SLOTS: u16 = 20;
const CHAINS: usize = 6;
const CHAIN: usize = 60;

/// Returns a tree of prompts: each prompt begins with about half of an earlier prompt.
fn trees() -> Vec<Vec<u64>> {
    let mut trees = vec![chain(1000, CHAIN)];
    for n in 1..CHAINS {
        let fork = CHAIN / 2 + n;
        trees.push([&trees[n / 2][..fork], &chain(n as u64, CHAIN - fork)].concat());
    }
    // As in long prompts, each hash after the first blocks represents several blocks.
    trees
        .iter_mut()
        .flat_map(|blocks| blocks.iter_mut().skip(CHAIN * 2 / 3))
        .for_each(|block| *block |= 1);
    trees
}

fn op() -> impl Strategy<Value = IndexOp> {
    let slot = 0..SLOTS;
    prop_oneof![
        12 => (slot.clone(), 0..CHAINS, 0..=CHAIN).prop_map(|(slot, n, len)| IndexOp::Record(slot, n, len)),
        1 => slot.clone().prop_map(IndexOp::Forget),
        1 => slot.clone().prop_map(IndexOp::Restart),
        1 => (slot, 0..200_u32).prop_map(|(slot, blocks)| IndexOp::Capacity(slot, blocks)),
        1 => (0..50_usize).prop_map(IndexOp::Sweep),
    ]
}

/// A naive implementation of the index for comparison, with an unbounded set of blocks for each
/// endpoint.
struct NaiveIndex {
    trees: Vec<Vec<u64>>,
    cached: BTreeMap<EndpointRef, BTreeSet<u64>>,
    lives: BTreeMap<u16, u32>,
}

impl NaiveIndex {
    fn new() -> Self {
        Self {
            trees: trees(),
            cached: BTreeMap::new(),
            lives: BTreeMap::new(),
        }
    }

    fn everybody(&self) -> Vec<EndpointRef> {
        (0..SLOTS).map(|slot| self.present(slot)).collect()
    }

    fn present(&self, slot: u16) -> EndpointRef {
        EndpointRef {
            slot: Slot(slot),
            generation: Generation(self.lives.get(&slot).copied().unwrap_or(1)),
        }
    }

    fn apply(&mut self, index: &mut PrefixIndex, op: &IndexOp) {
        match *op {
            IndexOp::Record(slot, n, len) => {
                let at = self.present(slot);
                let blocks = &self.trees[n][..len];
                index.record(at, blocks);
                self.cached.entry(at).or_default().extend(blocks);
            }
            IndexOp::Forget(slot) => {
                index.forget(self.present(slot));
                self.cached.remove(&self.present(slot));
            }
            IndexOp::Restart(slot) => {
                let old = self.present(slot);
                self.lives.insert(slot, old.generation.0 + 1);
                index.record(self.present(slot), &[]);
                self.cached.remove(&old);
            }
            IndexOp::Capacity(slot, blocks) => index.set_capacity(self.present(slot), blocks),
            IndexOp::Sweep(budget) => {
                index.sweep(budget);
            }
        }
    }

    /// Returns one more than the position of the last block that `endpoint` holds.
    fn reach(&self, blocks: &[u64], endpoint: EndpointRef) -> u32 {
        let Some(held) = self.cached.get(&endpoint) else {
            return 0;
        };
        blocks
            .iter()
            .rposition(|block| held.contains(block))
            .map_or(0, |at| at as u32 + 1)
    }
}

/// Returns one more than the position of the last block whose entry satisfies the condition, by a
/// walk over all blocks.
fn deepest(
    index: &PrefixIndex,
    blocks: &[u64],
    endpoint: EndpointRef,
    of: fn(EntryState) -> bool,
) -> u32 {
    let Some(owner) = index.owners.get(endpoint) else {
        return 0;
    };
    let holding = |&block: &u64| {
        let entry = index.table.find(
            index.table.key(block, region(owner)),
            owner,
            EntryClass::Confirmed,
        );
        entry.is_some_and(|(_, entry)| of(index.owners.holding(entry, index.epoch_of(entry))))
    };
    blocks
        .iter()
        .rposition(holding)
        .map_or(0, |at| at as u32 + 1)
}

proptest! {
    /// Checks that, without holes, the look-up without a walk finds the same length as a walk.
    #[test]
    fn bisection_finds_what_a_walk_finds(ops in prop::collection::vec(op(), 0..120)) {
        let mut index = PrefixIndex::with_capacity(60_000);
        let mut twin = NaiveIndex::new();
        for op in &ops {
            twin.apply(&mut index, op);
        }
        let all = twin.everybody();
        for blocks in &twin.trees {
            let mut found = Vec::new();
            index.matched(blocks, &all, &mut found);
            for (&found, &at) in found.iter().zip(&all) {
                let cached = deepest(&index, blocks, at, |holding| holding.cached);
                prop_assert_eq!(found, MatchLength { cached, maybe_cached: deepest(&index, blocks, at, |holding| holding.maybe_cached) });
            }
        }
    }

    /// Checks that the index equals the naive implementation if it has room for all entries and no
    /// holes.
    #[test]
    fn with_room_it_is_exact(ops in prop::collection::vec(op(), 0..60)) {
        let mut index = PrefixIndex::with_capacity(60_000);
        let mut twin = NaiveIndex::new();
        for op in ops.iter().filter(|op| !matches!(op, IndexOp::Capacity(..))) {
            twin.apply(&mut index, op);
            let all = twin.everybody();
            for blocks in &twin.trees {
                let expected: Vec<u32> = all.iter().map(|&at| twin.reach(blocks, at)).collect();
                prop_assert_eq!(matched(&index, blocks, &all), expected);
            }
        }
        prop_assert_eq!(index.stats().evictions, 0);
    }

    /// Checks for random sizes and random operations that the index never reports more than is
    /// cached, and that its counts and its memory are consistent.
    #[test]
    fn it_never_claims_too_much(entries in 0..3000_usize, ops in prop::collection::vec(op(), 0..120)) {
        let mut index = PrefixIndex::with_capacity(entries);
        let mut twin = NaiveIndex::new();
        let bytes = index.bytes();
        for (turn, op) in ops.iter().enumerate() {
            twin.apply(&mut index, op);
            let all = twin.everybody();
            let blocks = &twin.trees[turn % CHAINS];
            let mut claimed = Vec::new();
            index.matched(blocks, &all, &mut claimed);
            prop_assert!(claimed.iter().zip(&all).all(|(claimed, &at)| claimed.maybe_cached <= twin.reach(blocks, at)), "{claimed:?}");
            prop_assert!(claimed.iter().all(|claimed| claimed.cached <= claimed.maybe_cached), "{claimed:?}");
            let stats = index.stats();
            prop_assert_eq!(stats.entries, count(&mut index));
            prop_assert!(stats.entries <= stats.entries_max && stats.entries_max < entries + LANES);
            prop_assert!(stats.entries <= twin.cached.values().map(BTreeSet::len).sum::<usize>());
            prop_assert_eq!((stats.bytes, index.bytes()), (bytes, bytes));
        }
    }
}
