//! A VM that traps, which the picker must never do: what it costs, and that the VM recovers with
//! its state. The module is a test build that traps on demand; everything else is as shipped.

use std::time::{Duration, Instant};

use e2e::ledger_metrics;
use http::Request;
use serde_json::json;
use testbed::client::{self, ClientReply, EventStream, Http2Client};
use testbed::load::LoadGenerator;
use testbed::model_server::ModelServerOptions;
use testbed::stack::{Stack, StackBuilder};
use testbed::{Result, drill, root, wait_for};

use crate::echo;

const LIMIT: Duration = Duration::from_secs(30);

fn trappable() -> Result<StackBuilder> {
    Ok(Stack::builder().envoy_config(drill::envoy_config()?))
}

/// Makes the worker that gets this connection trap.
async fn trap(stack: &Stack) -> Result<ClientReply> {
    stack
        .send(echo::post(
            "/v1/chat/completions",
            &[(drill::TRAP, "1")],
            echo::chat("trap").to_string(),
        )?)
        .await
}

#[test]
fn the_shipped_module_has_no_drill_in_it() -> Result<()> {
    let contains =
        |module: Vec<u8>| memchr::memmem::find(&module, drill::TRAP.as_bytes()).is_some();
    assert!(
        contains(std::fs::read(drill::module()?)?),
        "the test build contains the word, so the search can find it"
    );
    assert!(!contains(std::fs::read(
        root().join("target/wasm32-wasip1/release/switchpoint.wasm")
    )?));
    Ok(())
}

#[tokio::test]
async fn a_trap_costs_its_worker_a_moment_and_no_state() -> Result<()> {
    const CLIENTS: usize = 8;
    const TRAPS: usize = 6;
    let stack = trappable()?.servers(3).concurrency(4).start().await?;
    let load = LoadGenerator::start(stack.address(), CLIENTS);
    load.wait_for_more(100, LIMIT).await?;
    // A worker that became ready later may have parked some requests.
    let parked = stack.envoy.picker_stat("switchpoint_parked_total").await?;
    for _ in 0..TRAPS {
        let reply = trap(&stack).await?;
        assert_eq!(
            (reply.status, &reply.json()?["error"]["message"]),
            (503, &json!("the endpoint picker failed; retry"))
        );
        load.wait_for_more(100, LIMIT).await?;
    }
    let outcome =
        ledger_metrics::close_but("a VM traps six times", load, &stack, drill::is_of_a_trap)
            .await?;
    let failed = outcome.failures.len();
    // For each trap, a client loses at most the request that it had at the trapped worker at that
    // moment, or while the worker's VM recovered. Envoy's log also has the requests that trapped.
    assert!(failed <= CLIENTS * TRAPS, "{:?}", outcome.failures);
    ledger_metrics::agree(&stack, failed + TRAPS, drill::is_lost_to_a_trap).await?;

    let calm = LoadGenerator::start(stack.address(), 8);
    calm.wait_for_more(200, LIMIT).await?;
    calm.stop().await?.check_all_served()?;
    assert_eq!(
        stack.envoy.picker_stat("switchpoint_parked_total").await?,
        parked,
        "no request waited: the new VM read its state from shared data"
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_leaders_total")
            .await?,
        1,
        "the leader is the main thread's VM, which serves no requests and did not trap"
    );
    assert_eq!(
        stack
            .envoy
            .picker_stat("switchpoint_state_connected")
            .await?,
        1
    );
    Ok(())
}

/// By Envoy's default, a worker serves nothing for about a second after a trap. The shipped
/// configuration sets 10 ms.
#[tokio::test]
async fn a_worker_heals_long_before_envoys_default() -> Result<()> {
    let stack = trappable()?.servers(1).start().await?;
    let mut times = Vec::new();
    for _ in 0..5 {
        assert_eq!(trap(&stack).await?.status, 503);
        let began = Instant::now();
        let served = || async {
            (stack
                .post("/v1/chat/completions", &echo::chat("well again?"))
                .await
                .ok()?
                .status
                == 200)
                .then_some(())
        };
        wait_for(LIMIT, "the worker to heal", served).await?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    assert!(times[2] < Duration::from_millis(700), "{times:?}");
    Ok(())
}

#[tokio::test]
async fn streams_of_the_vm_that_trapped_end_and_are_not_held_against_the_engine() -> Result<()> {
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 100,
        ..ModelServerOptions::default()
    };
    let stack = trappable()?.servers_like(2, &slow).start().await?;
    let chat = json!({"model": "demo", "stream": true, "max_tokens": 1_000, "ignore_eos": true, "messages": [{"role": "user", "content": "long"}]});
    let request = || {
        Ok::<_, testbed::Error>(
            Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?,
        )
    };
    let connection = Http2Client::connect(stack.address()).await?;
    let mut one = EventStream::new(client::start(stack.address(), request()?).await?);
    let mut two = EventStream::new(connection.start(request()?).await?);
    one.next().await?.ok_or("the stream begins")?;
    two.next().await?.ok_or("the stream begins")?;

    assert_eq!(trap(&stack).await?.status, 503);
    let (one, two) = tokio::join!(one.rest(), two.rest());
    assert!(
        one.is_err() && two.is_err(),
        "the clients see that the streams broke: {one:?} {two:?}"
    );
    // The VM that counted these requests is gone, and so is the VM's in-flight count.
    let idle = || async {
        let endpoints = stack.daemon.as_ref()?.endpoints().await.ok()?;
        endpoints
            .iter()
            .all(|endpoint| endpoint["in_flight"] == 0)
            .then_some(())
    };
    wait_for(LIMIT, "the daemon to report no requests in flight", idle).await?;
    for _ in 0..10 {
        assert_eq!(stack.get("/v1/models").await?.status, 200);
    }
    Ok(())
}

#[tokio::test]
async fn streams_of_other_workers_notice_nothing() -> Result<()> {
    const STREAMS: usize = 12;
    let slow = ModelServerOptions {
        models: vec!["demo".into()],
        speed: 0.0,
        chunk_delay_ms: 50,
        ..ModelServerOptions::default()
    };
    let stack = trappable()?
        .servers_like(2, &slow)
        .concurrency(4)
        .start()
        .await?;
    let chat = json!({"model": "demo", "stream": true, "max_tokens": 60, "ignore_eos": true, "messages": [{"role": "user", "content": "long"}]});
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let request = Request::post("/v1/chat/completions").body(client::full(chat.to_string()))?;
        let mut events = EventStream::new(client::start(stack.address(), request).await?);
        events.next().await?.ok_or("the stream begins")?;
        streams.push(events);
    }
    assert_eq!(trap(&stack).await?.status, 503);
    let ends = futures::future::join_all(streams.into_iter().map(EventStream::rest)).await;
    let whole = ends
        .iter()
        .filter(|end| {
            end.as_ref()
                .is_ok_and(|events| events.last().is_some_and(|event| event.data == "[DONE]"))
        })
        .count();
    // The kernel spreads connections over the four workers. All twelve reach one worker with a
    // probability of one in four million.
    assert!(whole > 0, "streams of the other workers end normally");
    Ok(())
}
