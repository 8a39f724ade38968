//! HTTP clients: a regular client for HTTP/1 and HTTP/2, and a raw client that writes any bytes.
//!
//! Each call of [`send`] opens a new connection, so that requests do not affect each other. Every
//! call has a deadline, because a test that fails says more than a test that hangs.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use futures::stream;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::client::conn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::Result;

/// Time limit for one request, far longer than any successful request takes.
pub const REPLY_LIMIT: Duration = Duration::from_secs(30);

pub type Body = BoxBody<Bytes, Infallible>;

#[derive(Clone, Debug)]
pub struct ClientReply {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
    /// The trailers of the reply; `None` if the server sent no trailers.
    pub trailers: Option<HeaderMap>,
}

/// An HTTP/2 connection (prior knowledge) that can carry several requests at the same time.
#[derive(Clone, Debug)]
pub struct Http2Client(conn::http2::SendRequest<Body>);

/// A TCP connection on which a test reads and writes exact bytes.
#[derive(Debug)]
pub struct RawConnection {
    stream: TcpStream,
    /// Bytes that were read from the socket but not yet returned.
    buffer: Vec<u8>,
}

/// A reader that returns each server-sent event of a reply when the event arrives.
#[derive(Debug)]
pub struct EventStream {
    body: Incoming,
    buffer: Vec<u8>,
}

/// One server-sent event.
#[derive(Clone, Debug)]
pub struct ServerEvent {
    /// The time when [`EventStream::next`] returned the event.
    pub at: Instant,
    /// The `event:` field; empty if the event has none.
    pub name: String,
    /// The `data:` lines, joined by line feeds.
    pub data: String,
}

// === bodies ===

pub fn empty() -> Body {
    Empty::new().boxed()
}

/// Returns a body of known length.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed()
}

/// Returns a body of unknown length. The pieces of the body are chunks in HTTP/1, and DATA frames
/// (also empty frames) and trailers in HTTP/2.
pub fn frames(frames: Vec<Frame<Bytes>>) -> Body {
    BodyExt::boxed(StreamBody::new(stream::iter(frames.into_iter().map(Ok))))
}

// === HTTP/1 ===

/// Sends `GET path`.
///
/// # Errors
/// Fails if there is no complete reply within [`REPLY_LIMIT`].
pub async fn get(address: SocketAddr, path: &str) -> Result<ClientReply> {
    send(address, Request::get(path).body(empty())?).await
}

/// Sends `POST path` with a JSON content type.
///
/// # Errors
/// Fails if there is no complete reply within [`REPLY_LIMIT`].
pub async fn post(address: SocketAddr, path: &str, body: impl Into<Bytes>) -> Result<ClientReply> {
    send(
        address,
        Request::post(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(full(body))?,
    )
    .await
}

/// Sends a request over a new HTTP/1.1 connection and reads the complete reply.
///
/// # Errors
/// Fails if there is no complete reply within [`REPLY_LIMIT`].
pub async fn send(address: SocketAddr, request: Request<Body>) -> Result<ClientReply> {
    timeout(REPLY_LIMIT, async {
        ClientReply::read(start(address, request).await?).await
    })
    .await?
}

/// Sends a request over a new HTTP/1.1 connection. Returns when the headers of the reply arrive.
///
/// # Errors
/// Fails if the connection fails before the headers arrive, or if they do not arrive within
/// [`REPLY_LIMIT`].
pub async fn start(address: SocketAddr, request: Request<Body>) -> Result<Response<Incoming>> {
    start_within(address, request, REPLY_LIMIT).await
}

/// Like [`start`], but with the time limit `limit`, for requests that flow control may hold longer
/// than [`REPLY_LIMIT`].
///
/// # Errors
/// Fails if the connection fails before the headers arrive, or if they do not arrive within
/// `limit`.
pub async fn start_within(
    address: SocketAddr,
    mut request: Request<Body>,
    limit: Duration,
) -> Result<Response<Incoming>> {
    let host = HeaderValue::from_str(&address.to_string())?;
    request.headers_mut().entry(header::HOST).or_insert(host);
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (mut sender, connection) = conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with the body of the reply, or when the reply is dropped.
    tokio::spawn(connection.with_upgrades());
    Ok(timeout(limit, sender.send_request(request)).await??)
}

/// Whether this error means that an HTTP/1 reply began but did not end.
#[must_use]
pub fn is_broken_off(error: &str) -> bool {
    [
        "connection closed before message completed",
        "error reading a body from connection",
    ]
    .iter()
    .any(|how| error.contains(how))
}

// === impl Http2Client ===

impl Http2Client {
    /// Opens a connection.
    ///
    /// # Errors
    /// Fails if the server at the address does not accept HTTP/2.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) =
            conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    /// Sends a request and reads the complete reply.
    ///
    /// # Errors
    /// Fails if there is no complete reply within [`REPLY_LIMIT`].
    pub async fn send(&self, request: Request<Body>) -> Result<ClientReply> {
        timeout(REPLY_LIMIT, async {
            ClientReply::read(self.start(request).await?).await
        })
        .await?
    }

    /// Sends a request, whose URI may be only a path. Returns when the headers of the reply arrive.
    ///
    /// # Errors
    /// Fails if the connection fails before the headers arrive, or if they do not arrive within
    /// [`REPLY_LIMIT`].
    pub async fn start(&self, request: Request<Body>) -> Result<Response<Incoming>> {
        self.start_within(request, REPLY_LIMIT).await
    }

    /// Like [`Self::start`], but with the time limit `limit`.
    ///
    /// # Errors
    /// Fails if the connection fails before the headers arrive, or if they do not arrive within
    /// `limit`.
    pub async fn start_within(
        &self,
        mut request: Request<Body>,
        limit: Duration,
    ) -> Result<Response<Incoming>> {
        if request.uri().authority().is_none() {
            let mut parts = request.uri().clone().into_parts();
            parts.scheme = Some(http::uri::Scheme::HTTP);
            parts.authority = Some(http::uri::Authority::from_static("gateway"));
            *request.uri_mut() = Uri::from_parts(parts)?;
        }
        Ok(timeout(limit, self.0.clone().send_request(request)).await??)
    }
}

// === impl ClientReply ===

impl ClientReply {
    /// Reads the complete reply.
    ///
    /// # Errors
    /// Fails if the body ends early.
    pub async fn read(response: Response<Incoming>) -> Result<Self> {
        let (parts, body) = response.into_parts();
        let body = body.collect().await?;
        let trailers = body.trailers().cloned();
        Ok(Self {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: body.to_bytes(),
            trailers,
        })
    }

    /// Returns the first value of a header, or an empty text if the reply does not have the header.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Parses the body as JSON.
    ///
    /// # Errors
    /// Fails if the body is not JSON. The error quotes the body.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body)
            .map_err(|error| format!("{error} in {} {:?}", self.status, self.text()).into())
    }
}

// === impl RawConnection ===

impl RawConnection {
    /// Opens a connection.
    ///
    /// # Errors
    /// Fails if no socket listens at the address.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::new(),
        })
    }

    /// Opens a connection from the loopback address `client`, so that the server sees another
    /// client.
    ///
    /// # Errors
    /// Fails if no socket listens at `address`.
    pub async fn connect_from(client: Ipv4Addr, address: SocketAddr) -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((client, 0).into())?;
        let stream = socket.connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: Vec::new(),
        })
    }

    /// Writes exactly these bytes.
    ///
    /// # Errors
    /// Fails if the server closed the connection.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) -> Result<()> {
        Ok(self.stream.write_all(bytes.as_ref()).await?)
    }

    /// Closes the connection with a reset, like a client that crashes.
    ///
    /// # Errors
    /// Fails if the socket option cannot be set.
    pub fn reset(self) -> Result<()> {
        Ok(self.stream.set_zero_linger()?)
    }

    /// Reads until the server closes the connection.
    ///
    /// # Errors
    /// Fails if the connection breaks, or if no bytes arrive for [`REPLY_LIMIT`].
    pub async fn read_to_end(&mut self) -> Result<Vec<u8>> {
        while self.fill().await? > 0 {}
        Ok(std::mem::take(&mut self.buffer))
    }

    /// Reads up to the end of `mark`.
    ///
    /// # Errors
    /// Fails if the connection ends before these bytes arrive, or if no bytes arrive for
    /// [`REPLY_LIMIT`].
    pub async fn read_until(&mut self, mark: &[u8]) -> Result<Vec<u8>> {
        loop {
            if let Some(at) = find(&self.buffer, mark) {
                return Ok(self.buffer.drain(..at + mark.len()).collect());
            }
            self.fill_some().await?;
        }
    }

    /// Reads exactly this many bytes.
    ///
    /// # Errors
    /// Fails if the connection ends before these bytes arrive, or if no bytes arrive for
    /// [`REPLY_LIMIT`].
    pub async fn read_exactly(&mut self, bytes: usize) -> Result<Vec<u8>> {
        while self.buffer.len() < bytes {
            self.fill_some().await?;
        }
        Ok(self.buffer.drain(..bytes).collect())
    }

    /// Reads one HTTP/1 reply. `100 Continue` is a reply too, without a body.
    ///
    /// # Errors
    /// Fails if the reply is malformed or breaks off, or if no bytes arrive for [`REPLY_LIMIT`].
    pub async fn read_reply(&mut self) -> Result<ClientReply> {
        let head = String::from_utf8(self.read_until(b"\r\n\r\n").await?)?;
        let mut lines = head.split("\r\n");
        let status: u16 = lines
            .next()
            .and_then(|line| line.split(' ').nth(1))
            .ok_or("no status line")?
            .parse()?;
        let mut headers = HeaderMap::new();
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            headers.append(
                HeaderName::from_bytes(name.as_bytes())?,
                HeaderValue::from_str(value.trim())?,
            );
        }
        let length = headers
            .get(header::CONTENT_LENGTH)
            .map(|value| value.to_str())
            .transpose()?;
        let body = match length {
            _ if status < 200 || status == 204 || status == 304 => Vec::new(),
            Some(length) => self.read_exactly(length.parse()?).await?,
            None if headers
                .get(header::TRANSFER_ENCODING)
                .is_some_and(|coding| coding == "chunked") =>
            {
                self.read_chunks().await?
            }
            None => self.read_to_end().await?,
        };
        Ok(ClientReply {
            status,
            headers,
            body: body.into(),
            trailers: None,
        })
    }

    async fn read_chunks(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        loop {
            let line = String::from_utf8(self.read_until(b"\r\n").await?)?;
            let bytes =
                usize::from_str_radix(line.trim().split(';').next().unwrap_or_default(), 16)?;
            body.extend(self.read_exactly(bytes).await?);
            self.read_until(b"\r\n").await?;
            if bytes == 0 {
                return Ok(body);
            }
        }
    }

    async fn fill(&mut self) -> Result<usize> {
        Ok(timeout(REPLY_LIMIT, self.stream.read_buf(&mut self.buffer)).await??)
    }

    async fn fill_some(&mut self) -> Result<()> {
        if self.fill().await? > 0 {
            return Ok(());
        }
        Err(format!(
            "the connection ended after {:?}",
            String::from_utf8_lossy(&self.buffer)
        )
        .into())
    }
}

// === impl EventStream ===

impl EventStream {
    /// Creates a reader of the events of this reply.
    pub fn new(response: Response<Incoming>) -> Self {
        Self {
            body: response.into_body(),
            buffer: Vec::new(),
        }
    }

    /// Returns the next event, or `None` at the end of the reply.
    ///
    /// # Errors
    /// Fails if the reply breaks off, or if no bytes arrive for [`REPLY_LIMIT`].
    pub async fn next(&mut self) -> Result<Option<ServerEvent>> {
        loop {
            if let Some(at) = find(&self.buffer, b"\n\n") {
                let block = self.buffer.drain(..at + 2).collect::<Vec<_>>();
                return Ok(Some(ServerEvent::read(&String::from_utf8(block)?)));
            }
            match timeout(REPLY_LIMIT, self.body.frame()).await? {
                None => return Ok(None),
                Some(frame) => self.buffer.extend(frame?.into_data().unwrap_or_default()),
            }
        }
    }

    /// Returns all remaining events.
    ///
    /// # Errors
    /// Fails if the reply breaks off, or if no bytes arrive for [`REPLY_LIMIT`].
    pub async fn rest(mut self) -> Result<Vec<ServerEvent>> {
        let mut events = Vec::new();
        while let Some(event) = self.next().await? {
            events.push(event);
        }
        Ok(events)
    }
}

impl ServerEvent {
    fn read(block: &str) -> Self {
        let field = |name: &str| {
            let values = block
                .lines()
                .filter_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            values
                .map(|value| value.strip_prefix(' ').unwrap_or(value))
                .collect::<Vec<_>>()
                .join("\n")
        };
        Self {
            at: Instant::now(),
            name: field("event"),
            data: field("data"),
        }
    }
}

// === helpers ===

/// Percent-encodes text for a query string.
pub fn percent_encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let _ = write!(encoded, "%{byte:02X}"); // writing to a String cannot fail
        }
    }
    encoded
}

fn find(bytes: &[u8], mark: &[u8]) -> Option<usize> {
    bytes.windows(mark.len()).position(|window| window == mark)
}
