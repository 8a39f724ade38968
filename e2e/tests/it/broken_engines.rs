//! One of four engines is broken, answers at once and looks fine by its metrics: it gets next to no traffic, and traffic again once it is mended. All
//! kinds of faults at the same time, each in a pool of its own behind one Envoy of four workers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use e2e::plain_engine::{Answer, Behaviour, Delay};
use e2e::plain_pools::{PlainPool, PlainPools};
use e2e::stack::Stack;
use e2e::{Result, wait_for};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::sleep;

const CLIENTS: usize = 32;
/// A working engine's reply.
const REPLY: Duration = Duration::from_millis(500);
/// The issue's second, and as much again for a machine that does other things as well.
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
async fn ask(pool: Arc<PlainPool>, proxy: SocketAddr, client: usize, numbers: Arc<AtomicU64>, over: Arc<AtomicBool>) {
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
    let serve = world.pools.iter().map(|pool| async {
        let before = pool.requests()[0];
        // More than probes, of which there would be one in five seconds.
        let serves = || async { (pool.requests()[0] >= before + 10).then_some(()) };
        wait_for(MENDED_LIMIT, &format!("the mended engine of {} to serve", pool.name), serves).await?;
        println!("{}: ten requests within {:.1} s after it was mended", pool.name, mended.elapsed().as_secs_f64());
        Ok(())
    });
    futures::future::join_all(serve).await.into_iter().collect::<Result<Vec<()>>>()?;
    over.store(true, Ordering::Relaxed);
    Ok(())
}

/// An engine that dies of one prompt, as far as its connection goes, and answers all others.
async fn crashing_engine() -> Result<(SocketAddr, Arc<AtomicU64>)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let (address, crashes) = (listener.local_addr()?, Arc::new(AtomicU64::new(0)));
    let counted = crashes.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !String::from_utf8_lossy(&request).contains(END_OF_PROMPT) && !request.starts_with(b"GET") {
                    if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
                if String::from_utf8_lossy(&request).contains("poison") {
                    counted.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                let body = r#"{"choices":[{"message":{"content":"fine"}}]}"#;
                let reply = format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                let _ = stream.write_all(reply.as_bytes()).await; // the proxy may have left
            });
        }
    });
    Ok((address, crashes))
}

const END_OF_PROMPT: &str = "end of prompt";

#[tokio::test]
async fn a_prompt_that_crashes_engines_meets_two_of_them_and_is_then_refused() -> Result<()> {
    let mut engines = Vec::new();
    for _ in 0..4 {
        engines.push(crashing_engine().await?);
    }
    let builder = engines.iter().fold(Stack::builder(), |builder, (address, _)| builder.stranger(*address));
    let stack = builder.concurrency(1).start().await?;
    let ask = async |prompt: String| {
        let body = json!({"model": "demo", "messages": [{"role": "user", "content": format!("{prompt} {END_OF_PROMPT}")}]});
        stack.post("/v1/chat/completions", &body).await
    };
    for number in 0..24 {
        let reply = ask(format!("{number} is fine. ")).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let crashes = || engines.iter().map(|(_, crashes)| crashes.load(Ordering::Relaxed)).sum::<u64>();
    assert_eq!(ask("poison".to_owned()).await?.status, 503, "no engine survives it");
    assert_eq!(crashes(), 2, "tried once more, not on all of the list");
    let reply = ask("poison".to_owned()).await?;
    assert_eq!((reply.status, &reply.json()?["error"]["code"]), (502, &json!("crashing_prompt")));
    assert_eq!(crashes(), 2);
    assert_eq!(ask("another that is fine".to_owned()).await?.status, 200, "others are served");
    Ok(())
}
