//! The cost of hashing, recording and looking up prefixes, on this host or in wasm:
//!
//! ```sh
//! cargo run --release -p scheduler --example prefix_bench
//! cargo build --release -p scheduler --example prefix_bench --target wasm32-wasip1
//! # then run it in wasmtime, or in node's WASI
//! ```
//!
//! Hot figures are the best of many short batches, cold figures the median of single calls, so that
//! other programs on the machine matter less. The load is the worst case: 6,600 chains of 100
//! blocks, all 660,000 blocks distinct.
#![expect(
    clippy::disallowed_methods,
    reason = "measures time; no part of the crate"
)]
#![expect(clippy::print_stdout, reason = "prints its figures")]

use scheduler::prefix::{
    BLOCK_BYTES_DEFAULT, BLOCKS_MAX, ENTRIES_DEFAULT, PrefixIndex, SectionSums, block_hashes,
};
use scheduler::{EndpointRef, Generation, Rng, Slot};
use std::hint::black_box;
use std::time::{Duration, Instant};

const BATCHES: usize = 400;
const BATCH: Duration = Duration::from_micros(300);
const CHAIN: usize = 100;
const PAIRS: usize = 660_000;

fn main() {
    hash();
    for endpoints in [100, 1000] {
        index(endpoints, ENTRIES_DEFAULT, PAIRS);
    }
    index(100, PAIRS * 10 / 8, PAIRS);
    index(100, 2 * ENTRIES_DEFAULT, 3_125_000);
}

/// ns per call.
fn time(mut call: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..BATCHES {
        let start = Instant::now();
        let mut calls = 0_u32;
        while start.elapsed() < BATCH {
            for _ in 0..8 {
                call();
            }
            calls += 8;
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    best
}

/// Median ns of one call per item, each called once.
fn time_each<T>(items: impl Iterator<Item = T>, mut call: impl FnMut(T)) -> f64 {
    let each = items.map(|item| {
        let start = Instant::now();
        call(item);
        start.elapsed().as_nanos() as f64
    });
    let mut each: Vec<f64> = each.collect();
    each.sort_by(f64::total_cmp);
    each.get(each.len() / 2).copied().unwrap_or(0.0)
}

fn hash() {
    for kilobytes in [1, 10, 100, 1000] {
        let text = vec![b'x'; kilobytes * 1000];
        let mut turns = [SectionSums::new(1, BLOCK_BYTES_DEFAULT, BLOCKS_MAX)];
        let sum_ns = time(|| {
            turns[0].clear();
            turns[0].update(black_box(&text));
        });
        let key_ns = time(|| drop(black_box(block_hashes(1, b"model", b"", black_box(&turns)))));
        println!(
            "{kilobytes} KB: sums {:.2} us, {:.1} GB/s; hashes of them {:.2} us",
            sum_ns / 1e3,
            text.len() as f64 / sum_ns,
            key_ns / 1e3
        );
    }
}

fn endpoint(slot: usize) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot as u16),
        generation: Generation(1),
    }
}

fn blocks(rng: &mut Rng, count: usize) -> Vec<u64> {
    (0..count).map(|_| rng.next_u64() << 1).collect()
}

fn index(endpoints: usize, entries: usize, pairs: usize) {
    let start = Instant::now();
    let mut index = PrefixIndex::with_capacity(entries);
    println!(
        "\n{endpoints} endpoints, {pairs} pairs in {entries} places: {:.1} MB, made in {:?}",
        index.bytes() as f64 / 1e6,
        start.elapsed()
    );
    let all: Vec<EndpointRef> = (0..endpoints).map(endpoint).collect();
    for &endpoint in &all {
        index.set_capacity(endpoint, (pairs / endpoints) as u32 * 2);
    }
    let mut rng = Rng::seeded(1);
    let chains: Vec<Vec<u64>> = (0..pairs / CHAIN)
        .map(|_| blocks(&mut rng, CHAIN))
        .collect();
    let ns = time_each(
        chains.iter().zip(all.iter().cycle()),
        |(chain, endpoint)| index.record(*endpoint, chain),
    );
    println!("  insert, cold: {:.0} ns a block", ns / CHAIN as f64);
    let stats = index.stats();
    println!(
        "  lost {:.4} %",
        100.0 * (pairs - stats.entries) as f64 / pairs as f64
    );
    look_up(&mut index, &all, &chains, &mut rng);
}

fn look_up(index: &mut PrefixIndex, all: &[EndpointRef], chains: &[Vec<u64>], rng: &mut Rng) {
    let mut out = Vec::new();
    let mut look_up = |chain: &Vec<u64>| {
        index.matched(black_box(chain), all, &mut out);
        black_box(&out);
    };
    println!(
        "  look-up {CHAIN} blocks, one holder, cold: {:.0} ns",
        time_each(chains.iter(), &mut look_up)
    );
    let unknown: Vec<Vec<u64>> = (0..10_000).map(|_| blocks(rng, 4)).collect();
    println!(
        "  look-up of unknown chains, cold: {:.0} ns",
        time_each(unknown.iter(), &mut look_up)
    );
    for (count, holders) in [(400, 1), (400, 11), (4096, 1), (4096, 11), (4096, 100)] {
        let chain = blocks(rng, count);
        for holder in 0..holders {
            let length = count * (holder + 1) / holders;
            if let (Some(endpoint), Some(part)) =
                (all.get(holder * 37 % all.len()), chain.get(..length))
            {
                index.record(*endpoint, part);
            }
        }
        let ns = time(|| {
            index.matched(black_box(&chain), all, &mut out);
            black_box(&out);
        });
        println!("  look-up {count} blocks, {holders} holders: {ns:.0} ns");
    }
    if let (Some(first), chain) = (all.first(), blocks(rng, 4096)) {
        index.record(*first, &chain);
        let ns = time(|| index.record(*first, black_box(&chain)));
        println!("  refresh {:.1} ns a block", ns / 4096.0);
        let ns = time(|| index.record(*first, &blocks(rng, 400)));
        println!(
            "  insert into the filled table {:.0} ns a block",
            ns / 400.0
        );
        index.forget(*first);
        let start = Instant::now();
        index.sweep(usize::MAX);
        println!("  sweep of the whole table: {:?}", start.elapsed());
    }
}
