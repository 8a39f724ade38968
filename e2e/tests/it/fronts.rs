//! The picker behind Envoy's external processing service: the clauses of the Endpoint Picker Protocol hold there as they do in the filter.

use e2e::Result;
use e2e::stack::{Front, Stack};

use crate::echo;

#[tokio::test]
async fn a_request_is_picked_and_served_by_either_front() -> Result<()> {
    for front in Front::ALL {
        let stack = Stack::builder().front(front).servers(3).start().await?;
        let reply = stack.send(echo::post("/v1/chat/completions", &[], echo::chat("hello").to_string())?).await?;
        assert_eq!(reply.status, 200, "{front:?}: {}", reply.text());
        let ranked = echo::ranked(&reply)?;
        assert_eq!(ranked.len(), 3, "{front:?}");
        assert_eq!(ranked[0], stack.servers[stack.server_of(&reply)?].addr().to_string(), "{front:?}");
        assert_eq!(reply.json()?["body"], echo::chat("hello").to_string(), "{front:?}: byte for byte");
    }
    Ok(())
}
