//! Broken engines, and prompts that crash engines.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::json;
use testbed::Result;
use testbed::broken_pools::BrokenPools;
use testbed::stack::Stack;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// The maximum time until a mended engine gets traffic again: ten times as long as this should
/// take.
const MENDED_LIMIT: Duration = Duration::from_secs(100);

/// The workers of the Envoy under test.
const WORKERS: u32 = 4;

/// The maximum share of the requests that a broken engine may get in the measured 12 s.
const SHARE_MAX: f64 = 0.02;

/// The number of requests within the 12 s that is allowed whatever their share. Four probes are
/// due, and the workers send a few more if two workers probe at the same time. The number is the
/// same for one API, because an endpoint's next probe is a request of any API.
const PROBES_MAX: u64 = 2 * WORKERS as u64 + 2;

/// Causes all kinds of faults at the same time, each in a separate pool behind one Envoy with four
/// workers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_engine_gets_next_to_no_traffic_and_traffic_again_once_it_is_mended() -> Result<()>
{
    let pools = BrokenPools::start(WORKERS).await?;
    let counted = pools.count(&[pools.world().stack.address()]).await;
    for sent in &counted {
        println!(
            "{}: {:?}, {:.2} % to the broken engine, {:?}",
            sent.fault,
            sent.requests,
            sent.share_of_broken() * 100.0,
            sent.by_path
        );
    }
    let is_too_many = |to_broken: u64, share: f64| share > SHARE_MAX && to_broken > PROBES_MAX;
    let wrong = counted.iter().filter(|sent| {
        let mut apis = sent.by_path.iter();
        is_too_many(sent.requests[0], sent.share_of_broken())
            || apis.any(|api| is_too_many(api.to_broken, api.share_of_broken()))
            || sent.requests.iter().skip(1).any(|requests| *requests < 20)
    });
    let wrong: Vec<_> = wrong.collect();
    assert!(
        wrong.is_empty(),
        "requests by engine, the first is broken: {wrong:?}"
    );
    for (sent, took) in counted.iter().zip(pools.mend(MENDED_LIMIT).await?) {
        println!(
            "{}: got traffic {:.1} s after it was mended",
            sent.fault,
            took.as_secs_f64()
        );
    }
    Ok(())
}

/// Starts an engine that closes the connection on one prompt, as a crash would, and answers all
/// other prompts.
async fn crashing_engine() -> Result<(SocketAddr, Arc<AtomicU64>)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let crashes = Arc::new(AtomicU64::new(0));
    let counted = crashes.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let counted = counted.clone();
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !String::from_utf8_lossy(&request).contains(END_OF_PROMPT)
                    && !request.starts_with(b"GET")
                {
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
                let _ = stream.write_all(reply.as_bytes()).await; // the proxy may have closed the connection
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
    let builder = engines
        .iter()
        .fold(Stack::builder().servers(0), |builder, (address, _)| {
            builder.stranger(*address)
        });
    let stack = builder.concurrency(1).start().await?;
    let ask = async |prompt: String| {
        let body = json!({"model": "demo", "messages": [{"role": "user", "content": format!("{prompt} {END_OF_PROMPT}")}]});
        stack.post("/v1/chat/completions", &body).await
    };
    for number in 0..24 {
        let reply = ask(format!("{number} is fine. ")).await?;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let crashes = || {
        engines
            .iter()
            .map(|(_, crashes)| crashes.load(Ordering::Relaxed))
            .sum::<u64>()
    };
    assert_eq!(
        ask("poison".to_owned()).await?.status,
        503,
        "every engine crashes on this prompt"
    );
    assert_eq!(crashes(), 2, "retried once, not on the whole ranked list");
    let reply = ask("poison".to_owned()).await?;
    assert_eq!(
        (reply.status, &reply.json()?["error"]["code"]),
        (502, &json!("crashing_prompt"))
    );
    assert_eq!(crashes(), 2);
    assert_eq!(
        ask("another that is fine".to_owned()).await?.status,
        200,
        "other prompts are still served"
    );
    Ok(())
}
