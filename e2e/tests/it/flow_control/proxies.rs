//! Two proxies with four workers each share the room of one engine.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use e2e::ledger_metrics::note;
use e2e::queued_requests;
use testbed::second_envoy::SecondEnvoy;
use testbed::stack::Stack;
use testbed::{Result, wait_for};

use super::seat_engine::SeatEngine;
use super::workers::{Replies, all_served, send_to};

const LIMIT: Duration = Duration::from_secs(60);
const WORKERS: u32 = 4;
const SEATS: u32 = 6;
const DELAY: Duration = Duration::from_millis(150);

/// The maximum number of requests above the limit: one for each proxy, sent before it knows the
/// picks of the other.
const OVERSHOOT_MAX: usize = 2;

struct TwoProxies {
    engine: SeatEngine,
    stack: Stack,
    second: SecondEnvoy,
    _folder: tempfile::TempDir,
}

// === impl TwoProxies ===

impl TwoProxies {
    async fn start() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let engine = SeatEngine::start(DELAY).await?;
        let builder = Stack::builder()
            .servers(0)
            .stranger(engine.address)
            .concurrency(WORKERS);
        let stack = queued_requests::holding_tenants(builder, folder.path(), SEATS)?
            .start()
            .await?;
        let second = SecondEnvoy::start(&stack, "second", WORKERS).await?;
        Ok(Self {
            engine,
            stack,
            second,
            _folder: folder,
        })
    }

    fn addresses(&self) -> [SocketAddr; 2] {
        [self.stack.address(), self.second.envoy.listener()]
    }

    /// Returns how many requests both proxies have held so far.
    async fn held_total(&self) -> Result<i64> {
        let name = "switchpoint_held_total";
        Ok(self.stack.envoy.picker_stat(name).await? + self.second.envoy.picker_stat(name).await?)
    }

    /// Fills the engine through both proxies, one request after the other.
    async fn fill(&self) -> Result<Replies> {
        let mut replies = Vec::new();
        for at in 0..SEATS as usize + 6 {
            replies.extend(send_to(self.addresses()[at % 2], 1, "batch", "filler")?);
            // The other proxy learns of each request before the test sends the next request.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(replies)
    }

    /// Sends `counts` requests through the two proxies while the engine answers none, until all are
    /// held. Then opens the engine. Returns how many requests of each proxy were sent while both
    /// proxies had some left.
    async fn compete(&self, counts: [usize; 2]) -> Result<[usize; 2]> {
        let begin = self.engine.arrivals().len();
        let held_before = self.held_total().await?;
        self.engine.close();
        let mut replies = self.fill().await?;
        for (address, (count, tenant)) in self
            .addresses()
            .into_iter()
            .zip(counts.into_iter().zip(["first", "second"]))
        {
            replies.extend(send_to(address, count, "batch", tenant)?);
        }
        let held_least = i64::try_from(replies.len() - SEATS as usize - OVERSHOOT_MAX)?;
        let held = || async {
            self.held_total()
                .await
                .ok()
                .filter(|held| held - held_before >= held_least)
        };
        wait_for(LIMIT, "all requests to be held", held).await?;
        self.engine.most();
        self.engine.open();
        all_served(replies).await?;
        let arrivals = &self.engine.arrivals()[begin..];
        let of = |tenant: &str, end: usize| {
            arrivals[..end]
                .iter()
                .filter(|(.., known)| known == tenant)
                .count()
        };
        let last = |tenant: &str| {
            arrivals
                .iter()
                .rposition(|(.., known)| known == tenant)
                .ok_or("arrivals")
        };
        let end = last("first")?.min(last("second")?) + 1;
        Ok([of("first", end), of("second", end)])
    }
}

/// The proxies send chat that waits in one proxy before batch that waits in the other.
#[tokio::test]
async fn chat_of_one_proxy_goes_before_batch_of_the_other() -> Result<()> {
    let two = TwoProxies::start().await?;
    // On a busy machine, the test may count held requests only after an open engine has served most
    // of them. So the engine is closed first.
    two.engine.close();
    let mut replies = two.fill().await?;
    let [first, second] = two.addresses();
    replies.extend(send_to(first, 90, "batch", "")?);
    let held = || async {
        queued_requests::held(&two.stack)
            .await
            .filter(|held| *held > 40)
            .map(|_| ())
    };
    wait_for(LIMIT, "batch to be held", held).await?;
    two.engine.open();
    let begun = Instant::now();
    all_served(send_to(second, 24, "chat", "")?).await?;
    let took = begun.elapsed();
    all_served(replies).await?;
    let ideal = DELAY * 24 / SEATS;
    note(
        "chat at one proxy, batch at the other",
        &format!("24 chats in {took:?}; alone {ideal:?}"),
    );
    assert!(took < ideal * 3, "24 chats took {took:?}");
    Ok(())
}

/// `make e2e-long` runs these tests. On a busy machine a proxy learns too late of room that the
/// other proxy left, so its share is smaller.
mod slow {
    use super::*;

    #[tokio::test]
    async fn two_proxies_share_room_by_backlog_and_hardly_overshoot() -> Result<()> {
        let mut two = TwoProxies::start().await?;
        for counts in [[80, 80], [120, 40]] {
            let begun = Instant::now();
            let sent = two.compete(counts).await?;
            let most = two.engine.most();
            let took = begun.elapsed();
            let delay = two
                .stack
                .envoy
                .admin_page("/stats?filter=switchpoint_share_delay_us&usedonly")
                .await?;
            let delay = delay.lines().next().unwrap_or_default().to_owned();
            let row = format!(
                "{sent:?} of {counts:?} while both held, at most {most} of {SEATS} at once, {took:?}; {delay}"
            );
            note("two proxies, four workers each, one engine", &row);
            assert!(most <= SEATS as usize + OVERSHOOT_MAX, "{row}");
            let share = sent[0] as f64 / (sent[0] + sent[1]) as f64;
            let expected = counts[0] as f64 / (counts[0] + counts[1]) as f64;
            assert!((share - expected).abs() < 0.15, "{row}");
        }
        // Without the daemon, each proxy uses half of the engine.
        two.stack.daemon()?.process().kill()?;
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        let sent = two.compete([40, 40]).await?;
        let most = two.engine.most();
        let row = format!("{sent:?} of 40 each while both held, at most {most} of {SEATS} at once");
        note("the same, 2.5 s after the daemon died", &row);
        assert!(most <= SEATS as usize, "{row}");
        Ok(())
    }
}
