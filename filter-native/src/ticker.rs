//! The clock of the main thread: a thread that sends an event to it at each tick.
//!
//! Envoy gives a filter no timer. The thread does nothing else, so all work that is not a request's
//! runs on Envoy's main thread.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use exchange::Timestamp;

use crate::panics::lock;
use crate::process::NativeProcess;

/// The period of complete ticks, in ms.
const TICK_MS: u64 = 100;
/// The period while requests are held, in ms: the longest delay after time alone made room.
const HOLDING_MS: u64 = 10;
/// The period while there are other proxies, in ms. Picks with load that is 10 ms old are nearly as
/// good as picks with current load.
const SHARING_MS: u64 = 5;
/// The interval at which sent requests are checked, in ms: a fifth of the shortest silence after
/// which the module acts on a request.
const CHECK_MS: u64 = 1_000;

/// What is due at a tick.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DueWork {
    /// The work of a complete tick.
    pub(crate) is_complete: bool,
    /// The check of sent requests.
    pub(crate) checks: bool,
}

#[derive(Debug)]
pub(crate) struct Ticker {
    period_ms: AtomicU64,
    /// Whether the main thread has not yet handled the last event.
    is_pending: AtomicBool,
    runs: Mutex<bool>,
    /// The times of the last complete tick and of the last check.
    done: Mutex<(Timestamp, Timestamp)>,
}

// === impl Ticker ===

impl Ticker {
    pub(crate) fn new() -> Self {
        Self {
            period_ms: AtomicU64::new(TICK_MS),
            is_pending: AtomicBool::new(false),
            runs: Mutex::new(false),
            done: Mutex::default(),
        }
    }

    /// Starts the thread, unless it runs.
    pub(crate) fn start(&self, process: &'static NativeProcess) {
        let mut runs = lock(&self.runs);
        if *runs {
            return;
        }
        let thread = std::thread::Builder::new().name("switchpoint-tick".to_owned());
        match thread.spawn(move || process.ticker().run(process)) {
            Ok(_) => *runs = true,
            Err(error) => log::error!("the module has no clock, and follows no daemon: {error}"),
        }
    }

    /// Sends ticks until there is no configuration.
    fn run(&self, process: &NativeProcess) {
        loop {
            let period = Duration::from_millis(self.period_ms.load(Ordering::Relaxed));
            std::thread::park_timeout(period);
            let mut runs = lock(&self.runs);
            let is_new = !self.is_pending.swap(true, Ordering::Relaxed);
            if !process.send_tick(is_new) {
                *runs = false;
                return;
            }
        }
    }

    /// Lets the next tick be sent, because Envoy may have dropped the last one.
    pub(crate) fn forget_pending(&self) {
        self.is_pending.store(false, Ordering::Relaxed);
    }

    /// Begins a tick on the main thread.
    pub(crate) fn begin(&self, now: Timestamp) -> DueWork {
        self.forget_pending();
        let mut done = lock(&self.done);
        let is_complete = now.ms_since(done.0) >= TICK_MS;
        if is_complete {
            done.0 = now;
        }
        let checks = now.ms_since(done.1) >= CHECK_MS;
        if checks {
            done.1 = now;
        }
        DueWork {
            is_complete,
            checks,
        }
    }

    /// Sets the period for what the pools do.
    pub(crate) fn set_period(&self, has_peers: bool, holds: bool) {
        let period = match (has_peers, holds) {
            (true, _) => SHARING_MS,
            (false, true) => HOLDING_MS,
            (false, false) => TICK_MS,
        };
        self.period_ms.store(period, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_due_at_its_intervals() {
        let ticker = Ticker::new();
        let due = |ms| {
            let due = ticker.begin(Timestamp(0).plus_ms(ms));
            (due.is_complete, due.checks)
        };
        assert_eq!(due(10), (false, false));
        assert_eq!(due(100), (true, false));
        assert_eq!(due(150), (false, false));
        assert_eq!(due(1_000), (true, true));
        assert_eq!(due(1_005), (false, false));
    }
}
