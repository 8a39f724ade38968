//! Measures the cost of sharing for a pick, in test builds only (feature `drill`). The measurement
//! runs in a worker's VM and uses the shared data of a real Envoy.

use std::cell::{Cell, RefCell};

use exchange::{Exchange, ExchangeSettings, Timestamp};
use pool_state::{LoadReportHead, OwnLoadReport};
use scheduler::Version;

use crate::fake::{endpoints, pool_update_message};
use crate::host::{Host, WriteCondition};
use crate::shared_data::load_sharing::{SharingOccasion, VmContext};
use crate::shared_data::vm_table::VmTable;
use crate::vm::replica::{PoolReplica, decode};

/// The request header that asks for the cost of sharing instead of a normal reply. The value of the
/// header has the numbers of peers and endpoints: `peers/endpoints`.
pub const COST: &[u8] = b"x-drill-cost";

/// The header value that requests the cost of sharing in the last picks of real requests.
const LIVE: &[u8] = b"live";
/// The maximum number of picks that are kept.
const PICKS_MAX: usize = 4_096;

/// The number of measurements of each operation.
const ROUNDS: u64 = 2_000;
/// The number of loads in a report that change between two readings.
const CHANGES: usize = 6;

thread_local! {
    /// The cost of sharing in each of the last picks, in ns.
    static PICKS: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// The time that the current pick has spent on sharing so far, in ns.
    static PENDING: Cell<u64> = const { Cell::new(0) };
}

/// A timer of one of the two times that a pick spends on sharing. The timer runs until it is
/// dropped, and subtracts the time of reading the clock.
#[derive(Debug)]
pub struct PickTimer<'h, H: Host> {
    host: &'h H,
    began: Timestamp,
    reading_ns: u64,
    /// Whether the timer measures the time after the pick.
    is_last: bool,
}

// === impl PickTimer ===

impl<'h, H: Host> PickTimer<'h, H> {
    /// Starts to measure the reading of other VMs' data before a pick.
    pub fn before_pick(host: &'h H) -> Self {
        PENDING.set(0);
        Self::start(host, false)
    }

    /// Starts to measure the writing of this VM's data after a pick.
    pub fn after_pick(host: &'h H) -> Self {
        Self::start(host, true)
    }

    fn start(host: &'h H, is_last: bool) -> Self {
        let before = host.now();
        let began = host.now();
        Self {
            host,
            began,
            reading_ns: began.0.saturating_sub(before.0),
            is_last,
        }
    }
}

impl<H: Host> Drop for PickTimer<'_, H> {
    fn drop(&mut self) {
        let passed_ns = self.host.now().0.saturating_sub(self.began.0);
        let spent_ns = PENDING
            .get()
            .saturating_add(passed_ns.saturating_sub(self.reading_ns));
        PENDING.set(spent_ns);
        if self.is_last {
            PICKS.with_borrow_mut(|picks| {
                if picks.len() >= PICKS_MAX {
                    picks.clear();
                }
                picks.push(spent_ns);
            });
        }
    }
}

/// Returns the number of recorded picks, and four values of the cost of sharing of these picks, in
/// µs: mean, mean without the slowest hundredth, median, p99.
#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a call")]
fn live() -> String {
    let mut picks = PICKS.take();
    picks.sort_unstable();
    let us = |ns: u64| ns as f64 / 1_000.0;
    let at = |percent: usize| {
        us(picks
            .get(picks.len().saturating_mul(percent) / 100)
            .copied()
            .unwrap_or(0))
    };
    let mean = |picks: &[u64]| us(picks.iter().sum()) / picks.len().max(1) as f64;
    // This mean excludes the slowest hundredth, which the kernel interrupted, because the machine
    // has more threads than cores.
    let calm = mean(
        picks
            .get(..picks.len().saturating_mul(99) / 100)
            .unwrap_or_default(),
    );
    let mean = mean(&picks);
    format!(
        r#"{{"picks":{},"mean_us":{mean:.2},"calm_us":{calm:.2},"p50_us":{:.2},"p99_us":{:.2}}}"#,
        picks.len(),
        at(50),
        at(99)
    )
}

/// Returns the cost of sharing for a pick in this VM with this many peers, each with load at this
/// many endpoints. The result is JSON with the median time of each call, in µs. For the value
/// [`LIVE`], returns the cost of the last picks of real requests.
///
/// Returns `None` if the header [`COST`] is absent.
pub fn cost<H: Host>(host: &H, headers: &[u8]) -> Option<String> {
    let mut pairs = crate::pairs::HeaderPairs::new(headers);
    let (_, value) = pairs.find(|(name, _)| *name == COST)?;
    if value == LIVE {
        return Some(live());
    }
    let (peers, count) = std::str::from_utf8(value).ok()?.split_once('/')?;
    let peers = peers.parse::<u16>().ok()?;
    let count = count.parse::<usize>().ok()?;
    let mut replica = replica(host, count)?;
    let _kept = picks(&mut replica, count.saturating_mul(8));
    let mut vm_table = VmTable::default();
    for vm_slot in 0..=peers {
        vm_table.insert(proto::shared_data::VmEntry {
            vm: vm_of(vm_slot),
            heartbeat: host.now(),
            queue: 0,
            serves: true,
        });
    }
    let me = VmContext {
        vm: vm_of(peers),
        vm_slot: peers,
        vm_table: &vm_table,
    };
    Some(measure(host, me, &mut replica))
}

fn vm_of(vm_slot: u16) -> u64 {
    u64::from(vm_slot).saturating_add(1)
}

/// Returns a pool with this many endpoints.
fn replica<H: Host>(host: &H, count: usize) -> Option<PoolReplica> {
    let addresses = endpoints(count);
    let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
    let version = Version {
        term: 1,
        sequence: 1,
    };
    let message = pool_update_message("drill", version, &addresses);
    let update = decode(&message, |_| None::<&PoolReplica>).ok()?;
    let mut replica = PoolReplica::new("drill", 1);
    replica.apply(update, host.now());
    Some(replica)
}

/// Measures the calls of the VM `me`. Before each round of calls, the VMs in lower slots change
/// their load reports.
fn measure<H: Host>(host: &H, me: VmContext<'_>, replica: &mut PoolReplica) -> String {
    let mut row = replica
        .pool
        .write_load_report(&mut OwnLoadReport::default(), LoadReportHead::default())
        .to_vec();
    let rows = replica.pool.in_flight().rows().count();
    let now = host.now();
    let timed = |times: &mut Vec<u64>, act: &mut dyn FnMut()| {
        let began = host.now();
        act();
        times.push(host.now().0.saturating_sub(began.0));
    };
    let mut publish = Vec::new();
    let mut receive = Vec::new();
    let mut receive_same = Vec::new();
    let mut clock = Vec::new();
    for round in 0..ROUNDS {
        let at = Timestamp(now.0).plus_ms(round.checked_div(4).unwrap_or(0));
        for vm_slot in 0..me.vm_slot {
            let head = [vm_of(vm_slot).to_le_bytes(), at.0.to_le_bytes()];
            row.iter_mut()
                .zip(head.as_flattened())
                .for_each(|(to, byte)| *to = *byte);
            change_loads(&mut row, rows, round as usize);
            let key = format!("switchpoint/1/pool/drill/row/{vm_slot}");
            let _ = host.share(&key, &row, WriteCondition::Any);
        }
        let mut exchanges = picks(replica, 1);
        let PoolReplica { sharing, pool, .. } = replica;
        for times in [&mut receive, &mut receive_same] {
            sharing.reset();
            timed(times, &mut || {
                _ = sharing.receive(host, me, pool, at, SharingOccasion::Pick);
            });
        }
        timed(&mut publish, &mut || {
            sharing.publish(host, me, pool, at, SharingOccasion::Pick);
        });
        timed(&mut clock, &mut || {});
        for exchange in &mut exchanges {
            let _ = exchange.end(pool, at);
        }
    }
    let clock = median(clock);
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a call")]
    let us = |times| median(times).saturating_sub(clock) as f64 / 1_000.0;
    format!(
        r#"{{"peers":{},"endpoints":{rows},"row_bytes":{},"hear_us":{:.2},"hear_nothing_new_us":{:.2},"tell_us":{:.2}}}"#,
        me.vm_slot,
        row.len(),
        us(receive),
        us(receive_same),
        us(publish)
    )
}

/// Returns the median. The median is used because a mean would mostly measure the moments when
/// another process had the core.
fn median(mut times: Vec<u64>) -> u64 {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

/// Changes a few loads of a load report, as a few picks and ends of requests would since the last
/// reading.
fn change_loads(report: &mut [u8], rows: usize, round: usize) {
    let size = report
        .len()
        .saturating_sub(LoadReportHead::BYTES)
        .checked_div(rows)
        .unwrap_or(0);
    for place in 0..CHANGES {
        let entry = place
            .wrapping_mul(7)
            .wrapping_add(round)
            .checked_rem(rows)
            .unwrap_or(0);
        // This byte is the low byte of the prefill tokens, which are the second word of a load.
        if let Some(byte) = report.get_mut(
            entry
                .saturating_mul(size)
                .saturating_add(LoadReportHead::BYTES)
                .saturating_add(8),
        ) {
            *byte = byte.wrapping_add(1);
        }
    }
}

fn picks(replica: &mut PoolReplica, count: usize) -> Vec<Exchange> {
    let pairs: [(&[u8], &[u8]); 2] = [(b":method", b"GET"), (b":path", b"/v1/models")];
    let pick = |_| {
        let mut exchange = Exchange::new(Timestamp(0));
        let _ = exchange.request_headers(&ExchangeSettings::default(), pairs, true);
        let _ = exchange.decide(
            &ExchangeSettings::default(),
            &mut replica.pool,
            None,
            &[],
            Timestamp(0),
        );
        exchange
    };
    (0..count).map(pick).collect()
}
