//! What all routers have in common: the model, the number of threads, and the check for a first
//! answer.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use testbed::{Result, client, wait_for};

/// Threads of each router process. The machine for which the race is made has as many cores.
pub const THREADS: u32 = 2;
/// The maximum time that a router may take to start, while others start on the same machine.
const START_LIMIT: Duration = Duration::from_secs(90);
pub const MODEL: &str = "demo";

/// Waits until a chat request is answered.
///
/// # Errors
/// Fails if no request is answered in time.
pub async fn answers(address: SocketAddr) -> Result<()> {
    let body = json!({"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let served = || async {
        client::post(address, "/v1/chat/completions", body.clone())
            .await
            .is_ok_and(|reply| reply.status == 200)
            .then_some(())
    };
    wait_for(START_LIMIT, "the first answer", served).await
}
