//! Failures that are the fault of one client, and replies of an unusual shape. No engine of a pool
//! is ejected while other clients use it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use http::{Request, StatusCode};
use serde_json::{Value, json};
use testbed::Result;
use testbed::client::{self, ClientReply};
use testbed::plain_engine::{AnswerDelay, PlainAnswer, PlainBehaviour};
use testbed::plain_pools::{POOL_HEADER, PlainPool, PlainPools};
use tokio::time::sleep;

const WORKERS: u32 = 4;

/// The engines of each pool.
const ENGINES: usize = 4;

/// The clients of a pool, without the client whose requests fail.
const CLIENTS: usize = 6;

/// The time that an engine takes for a reply. A refusal takes no time.
const REPLY: Duration = Duration::from_millis(300);

/// The time before the bad clients begin. Until then, requests of other clients have succeeded at
/// every worker.
const WARM_UP: Duration = Duration::from_secs(2);

/// The time during which the bad clients send. An ejection would come with the fifth failure, which
/// is within the first second.
const MEASURED: Duration = Duration::from_secs(7);

/// The time between two requests of a bad client: 21 requests a second.
const BAD_PAUSE: Duration = Duration::from_millis(48);

/// The least number of requests that a bad client must have sent. It sends 140 on an idle machine.
const BAD_MIN: u64 = 50;

/// The time from a reply to the next turn. Other workers learn of a turn within milliseconds.
const TURN_PAUSE: Duration = Duration::from_millis(20);

/// The least share of turns at the engine of the turn before, for a client of batches. It is nearly
/// 1; a client whose engines were ejected in turn would get 0.4.
const RETURNED_MIN: f64 = 0.8;

/// The requests of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultRequest {
    Response,
    /// Continues a response that no engine knows. Each engine answers 404.
    InventedId,
    Chat,
    /// Each engine answers 500, to the same prompt and to distinct prompts.
    Poison,
    Generate,
    /// An array of prompts. The reply is an array.
    Batch,
}

/// A client with its own API key.
#[derive(Clone, Debug)]
struct FaultClient {
    pool: Arc<PlainPool>,
    proxy: SocketAddr,
    key: String,
    sends: FaultRequest,
}

// === impl FaultRequest ===

impl FaultRequest {
    fn path(self) -> &'static str {
        match self {
            Self::Response | Self::InventedId => "/v1/responses",
            Self::Chat | Self::Poison => "/v1/chat/completions",
            Self::Generate | Self::Batch => "/generate",
        }
    }

    fn body(self, prompt: &str, number: u64) -> Value {
        match self {
            Self::Response => json!({"model": "demo", "input": prompt}),
            Self::InventedId => {
                json!({"model": "demo", "input": prompt, "previous_response_id": format!("resp_invented_{number}")})
            }
            Self::Chat => {
                json!({"model": "demo", "messages": [{"role": "user", "content": prompt}]})
            }
            Self::Poison => {
                let which = if number.is_multiple_of(2) { 0 } else { number };
                json!({"model": "demo", "messages": [{"role": "user", "content": format!("poison {which} ").repeat(40)}]})
            }
            Self::Generate => json!({"model": "demo", "text": prompt}),
            Self::Batch => json!({"model": "demo", "text": ["a", prompt]}),
        }
    }
}

// === impl FaultClient ===

impl FaultClient {
    async fn send(&self, prompt: &str, number: u64) -> Result<ClientReply> {
        let body = self.sends.body(prompt, number).to_string();
        let request = Request::post(self.sends.path())
            .header(POOL_HEADER, &self.pool.name)
            .header("content-type", "application/json")
            .header("authorization", format!("Bearer {}", self.key))
            .header("x-switchpoint-explain", "1")
            .body(client::full(body))?;
        client::send(self.proxy, request).await
    }

    /// Sends the turns of a conversation until `end`. Returns the engine of each turn.
    async fn converse(self, end: Instant) -> Result<Vec<String>> {
        let mut prompt = format!("conversation of {} ", self.key).repeat(300);
        let mut engines = Vec::new();
        while Instant::now() < end {
            let reply = self.send(&prompt, 0).await?;
            let reasons: Value = serde_json::from_str(reply.header("x-switchpoint-decision"))?;
            let is_ejected = |row: &Value| row["dropped_by"] == json!("ejected");
            let rows = reasons["candidates"].as_array().ok_or("no candidates")?;
            assert_eq!(rows.len(), ENGINES, "{reasons}");
            assert!(
                reply.status == 200 && !rows.iter().any(is_ejected),
                "{}, turn {}: {} {reasons}",
                self.pool.name,
                engines.len(),
                reply.status
            );
            engines.push(reply.header("x-served-by").to_owned());
            prompt.push_str("and so on ");
            sleep(TURN_PAUSE).await;
        }
        Ok(engines)
    }

    /// Sends requests that fail with this status, from the end of the warm-up until `end`. Returns
    /// their number.
    async fn misbehave(self, status: StatusCode, end: Instant) -> Result<u64> {
        sleep(WARM_UP).await;
        let mut ticks = tokio::time::interval(BAD_PAUSE);
        let mut sent = 0;
        while Instant::now() < end {
            ticks.tick().await;
            let reply = self.send("more", sent).await?;
            assert_eq!(reply.status, status.as_u16(), "{}", reply.text());
            sent += 1;
        }
        Ok(sent)
    }
}

fn works() -> PlainBehaviour {
    PlainBehaviour::with_delay(AnswerDelay::Constant(REPLY))
}

/// Starts a pool whose engines refuse every request that contains `mark`.
async fn refusing(name: &str, mark: &'static str, status: StatusCode) -> Result<PlainPool> {
    let behaviour = PlainBehaviour {
        answer: PlainAnswer::ReplyUnless {
            mark,
            status,
            body: r#"{"error":{"message":"no"}}"#,
        },
        ..works()
    };
    PlainPool::start(name, vec![behaviour; ENGINES]).await
}

/// Returns the share of turns at the engine of the turn before.
fn returned(engines: &[String]) -> f64 {
    let turns = engines.windows(2);
    let later = turns.len().max(1);
    let same = turns.filter(|turn| turn[0] == turn[1]).count();
    same as f64 / later as f64
}

/// Runs three pools behind one proxy. In two pools, all requests of one client fail at every
/// engine. In the third, one client sends arrays of prompts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_client_whose_requests_fail_ejects_no_engine_and_neither_do_batches() -> Result<()> {
    let missing = StatusCode::NOT_FOUND;
    let error = StatusCode::INTERNAL_SERVER_ERROR;
    let pools = vec![
        refusing("invented-ids", "previous_response_id", missing).await?,
        refusing("failing-prompts", "poison", error).await?,
        PlainPool::start("batches", vec![works(); ENGINES]).await?,
    ];
    let world = PlainPools::start(pools, |builder| {
        builder
            .concurrency(WORKERS)
            .shared_envoy()
            .picker(json!({"explain": true}))
    })
    .await?;
    let [ids, prompts, batches] = &world.pools[..] else {
        return Err("not three pools".into());
    };
    let client = |pool: &Arc<PlainPool>, key: &str, sends| FaultClient {
        pool: pool.clone(),
        proxy: world.stack.address(),
        key: key.to_owned(),
        sends,
    };
    let end = Instant::now() + WARM_UP + MEASURED;
    let mut conversations = vec![client(batches, "batch", FaultRequest::Batch)];
    for number in 0..CLIENTS {
        let key = number.to_string();
        conversations.push(client(ids, &key, FaultRequest::Response));
        conversations.push(client(prompts, &key, FaultRequest::Chat));
    }
    for key in ["0", "1"] {
        conversations.push(client(batches, key, FaultRequest::Generate));
    }
    let conversations = conversations
        .into_iter()
        .map(|client| tokio::spawn(client.converse(end)));
    let bad = [
        (client(ids, "bad", FaultRequest::InventedId), missing),
        (client(prompts, "bad", FaultRequest::Poison), error),
    ]
    .map(|(client, status)| tokio::spawn(client.misbehave(status, end)));
    let mut turns = Vec::new();
    for conversation in join_all(conversations).await {
        turns.push(conversation??);
    }
    for (sent, status) in join_all(bad).await.into_iter().zip([missing, error]) {
        let sent = sent??;
        println!("drill: {sent} requests of one client got {status}");
        assert!(sent >= BAD_MIN, "{status}: {sent}");
    }
    let returned = returned(turns.first().ok_or("no conversation")?);
    let sent: usize = turns.iter().map(Vec::len).sum();
    println!("drill: {sent} turns of others, none failed; {returned:.2} of the batches returned");
    assert!(returned >= RETURNED_MIN, "{:?}", turns.first());
    Ok(())
}
