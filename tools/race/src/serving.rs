//! What all routers have in common: the model, the number of threads, and the wait for a first
//! answer.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use testbed::{Result, client, wait_for};

/// The threads of each router process: as many as the cores of the machine for which the race is
/// made.
pub const THREADS: u32 = 2;
/// The maximum time that a router may take to start, while other routers start on the same machine.
const START_LIMIT: Duration = Duration::from_secs(90);
pub const MODEL: &str = "demo";

/// Waits until the server at `address` answers a chat request.
///
/// # Errors
/// Fails if the server answers no request within the time limit for a start.
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
