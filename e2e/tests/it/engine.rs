//! Minimal engines that write to the raw socket, to do what a well-behaved engine never does.

use std::net::SocketAddr;

use testbed::Result;
use testbed::ports::ReservedPort;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// An engine that listens until it is dropped.
pub(crate) struct RawEngine {
    port: ReservedPort,
    task: JoinHandle<()>,
}

// === impl RawEngine ===

impl RawEngine {
    /// Starts the engine. The engine gives every connection to `serve` after reading the head of
    /// its first request. The engine answers 404 to the daemon's scrapes.
    pub(crate) async fn start<F>(serve: impl Fn(TcpStream) -> F + Send + 'static) -> Result<Self>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let port = ReservedPort::lease()?;
        let listener = TcpListener::bind(port.address()).await?;
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                match head(&mut stream).await {
                    Some(head) if !head.starts_with("GET /metrics") => drop(tokio::spawn(serve(stream))),
                    _ => drop(stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await),
                }
            }
        });
        Ok(Self { port, task })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.port.address()
    }
}

impl Drop for RawEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Reads the head of a request without a body; `None` if the connection ends first.
pub(crate) async fn head(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"\r\n\r\n") {
        bytes.push(stream.read_u8().await.ok()?);
    }
    String::from_utf8(bytes).ok()
}
