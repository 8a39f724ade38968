//! Streamed replies, in chunks of any size, and the faults that cut replies off.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures::{StreamExt as _, stream};
use http::{HeaderMap, Response};

use super::ServerExchange;
use crate::model_server::driver::GenerationHandle;
use crate::model_server::reply::ModelReply;
use crate::model_server::response::{EVENT_STREAM, typed};
use crate::model_server::socket::ServedConnection;

/// The pause before a reset, in which written bytes reach the socket. A reset discards all other
/// bytes.
const FLUSH: Duration = Duration::from_millis(10);

/// Time between the pieces of a split stream, long enough for a reader to see each piece alone.
const PIECE_DELAY: Duration = Duration::from_millis(1);

impl ServerExchange {
    pub(super) fn streamed(
        self,
        reply: ModelReply,
        generation: GenerationHandle,
        headers: HeaderMap,
    ) -> Response<Body> {
        let events = ReplyEvents {
            reply,
            generation,
            connection: self.connection,
            cut_after: self.cut_after,
            // The first token does not wait for more tokens, as in engines that bundle tokens.
            chunks_wanted: 1,
            chunks_per_write: self.server.options.chunks_per_write.max(1),
            chunk_delay: Duration::from_millis(self.server.options.chunk_delay_ms),
            closed: false,
        };
        let chunks = stream::unfold(events, |mut events| async move {
            Some((events.next().await?, events))
        });
        let body = match self.server.options.bytes_per_write {
            0 => Body::from_stream(chunks.map(Ok::<_, Infallible>)),
            bytes => Body::from_stream(
                chunks
                    .flat_map(move |chunk| stream::iter(pieces(&chunk, bytes)))
                    .then(async |piece| {
                        tokio::time::sleep(PIECE_DELAY).await;
                        Ok::<_, Infallible>(piece)
                    }),
            ),
        };
        let mut reply = typed(EVENT_STREAM, body);
        reply.headers_mut().extend(headers);
        reply
    }
}

fn pieces(chunk: &Bytes, bytes: usize) -> Vec<Bytes> {
    (0..chunk.len())
        .step_by(bytes)
        .map(|start| chunk.slice(start..chunk.len().min(start + bytes)))
        .collect()
}

pub(super) async fn reset_after_flush<T>(connection: &ServedConnection) -> T {
    tokio::time::sleep(FLUSH).await;
    connection.reset(b"");
    std::future::pending().await
}

struct ReplyEvents {
    reply: ModelReply,
    generation: GenerationHandle,
    connection: Arc<ServedConnection>,
    cut_after: Option<u32>,
    /// The number of chunks in the next write.
    chunks_wanted: u32,
    chunks_per_write: u32,
    chunk_delay: Duration,
    closed: bool,
}

impl ReplyEvents {
    async fn next(&mut self) -> Option<Bytes> {
        if self.closed {
            return None;
        }
        if self.cut_after == Some(0) {
            return reset_after_flush(&self.connection).await;
        }
        let mut out = Vec::new();
        let mut chunks = 0;
        let wanted = std::mem::replace(&mut self.chunks_wanted, self.chunks_per_write);
        while chunks < wanted {
            match self.generation.next().await {
                Some(output) => chunks += u32::from(self.reply.stream(output, &mut out)),
                None if self.generation.is_over() => {
                    self.reply.close(&mut out);
                    self.closed = true;
                    break;
                }
                None => return reset_after_flush(&self.connection).await, // the engine was restarted
            }
        }
        if !self.chunk_delay.is_zero() {
            tokio::time::sleep(self.chunk_delay).await;
        }
        self.cut_after = self.cut_after.map(|left| left - 1);
        Some(out.into())
    }
}
