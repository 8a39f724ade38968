//! One of four engines is broken, answers at once and looks fine by its metrics: it gets next to no traffic, and traffic again once it is mended. All
//! kinds of faults at the same time, each in a pool of its own behind one Envoy of four workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use e2e::plain_engine::{Answer, Behaviour, Delay};
use e2e::plain_pools::{PlainPool, PlainPools};
use e2e::{Result, wait_for};
use serde_json::json;
use tokio::time::sleep;

const CLIENTS: usize = 32;
/// A working engine's reply.
const REPLY: Duration = Duration::from_millis(500);
/// The second, and as much again for a machine that does other things as well.
const SETTLING: Duration = Duration::from_secs(2);
const MEASURED: Duration = Duration::from_secs(6);
/// Ten times what it should take.
const MENDED_LIMIT: Duration = Duration::from_secs(100);
const SHARE_MAX: f64 = 0.02;
/// Requests of one client, however long a test that forgot to stop goes on.
const REQUESTS_MAX: u64 = 20_000;

fn broken(answer: Answer) -> Behaviour {
    Behaviour { answer, ..Behaviour::default() }
}

/// Each fault by name: the pool's, and what the broken engine does.
fn faults() -> Vec<(&'static str, Behaviour)> {
    let error = |code: u16| json!({"error": {"message": "CUDA error", "type": "InternalServerError", "code": code}}).to_string();
    vec![
        ("status-500", Behaviour::with_status(500, &error(500))),
        ("status-404", Behaviour::with_status(404, &error(404))),
        ("status-401", Behaviour::with_status(401, &error(401))),
        ("status-502", Behaviour::with_status(502, "bad gateway")),
        ("empty-200", Behaviour::with_status(200, "")),
        ("error-in-200", Behaviour::with_status(200, &error(500))),
        ("cut-stream", broken(Answer::CutAfterFirstToken)),
    ]
}

/// A client with one request under way at a time; every other prompt is one of four that come again and again.
async fn ask(pool: Arc<PlainPool>, proxy: std::net::SocketAddr, client: usize, numbers: Arc<AtomicU64>, over: Arc<AtomicBool>) {
    for _ in 0..REQUESTS_MAX {
        if over.load(Ordering::Relaxed) {
            return;
        }
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        let prompt = if number.is_multiple_of(2) { format!("{number} is distinct. ") } else { format!("{} of four. ", client % 4) };
        let body = json!({"model": "demo", "stream": true, "max_tokens": 4, "messages": [{"role": "user", "content": prompt.repeat(40)}]});
        let _ = pool.post(proxy, "/v1/chat/completions", &body).await; // a broken engine's reply is an error, and meant to be
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_engine_gets_next_to_no_traffic_and_traffic_again_once_it_is_mended() -> Result<()> {
    let works = || Behaviour::with_delay(Delay::Constant(REPLY));
    let mut pools = Vec::new();
    for (name, fault) in faults() {
        pools.push(PlainPool::start(name, [fault, works(), works(), works()]).await?);
    }
    let world = PlainPools::start(pools, |builder| builder.concurrency(4)).await?;
    let (proxy, over) = (world.stack.address(), Arc::new(AtomicBool::new(false)));
    for pool in &world.pools {
        let numbers = Arc::new(AtomicU64::new(0));
        for client in 0..CLIENTS {
            tokio::spawn(ask(pool.clone(), proxy, client, numbers.clone(), over.clone()));
        }
    }
    sleep(SETTLING).await;
    let before: Vec<Vec<u64>> = world.pools.iter().map(|pool| pool.requests()).collect();
    sleep(MEASURED).await;
    let mut wrong = Vec::new();
    for (pool, before) in world.pools.iter().zip(&before) {
        let sent: Vec<u64> = pool.requests().iter().zip(before).map(|(now, before)| now - before).collect();
        let share = sent[0] as f64 / sent.iter().sum::<u64>() as f64;
        println!("{}: {sent:?}, {:.2} % to the broken one", pool.name, share * 100.0);
        if !(share <= SHARE_MAX && sent.iter().skip(1).all(|sent| *sent > 20)) {
            wrong.push(format!("{}: {sent:?}", pool.name));
        }
    }
    assert!(wrong.is_empty(), "the first is broken: {wrong:?}");

    let mended = Instant::now();
    for pool in &world.pools {
        pool.engines[0].behave(works());
    }
    let before: Vec<u64> = world.pools.iter().map(|pool| pool.requests()[0]).collect();
    for (pool, before) in world.pools.iter().zip(before) {
        // More than a few probes: it serves as the others do.
        let serves = || async { (pool.requests()[0] >= before + 50).then_some(()) };
        wait_for(MENDED_LIMIT, &format!("the mended engine of {} to serve", pool.name), serves).await?;
        println!("{}: 50 requests {:.1} s after it was mended", pool.name, mended.elapsed().as_secs_f64());
    }
    over.store(true, Ordering::Relaxed);
    Ok(())
}
