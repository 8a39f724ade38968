//! The part of ZMTP 3.0 (<https://rfc.zeromq.org/spec/23/>) that receives KV events: a client that
//! subscribes to a publisher, or requests a replay from a router, without encryption.
//!
//! The crate `zeromq` (0.7) is not used, because it reserves as many bytes as a frame announces,
//! and collects any number of frames. So one publisher could end the daemon with nine bytes. This
//! client reserves memory only for bytes that have arrived, and messages, commands and the bytes of
//! a second have a limit.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::{Instant, sleep_until, timeout};

/// The maximum size of a message. The largest batch of an honest engine is that of one step: with
/// 131,072 new tokens of 5 bytes it has 0.7 MB.
pub const MESSAGE_BYTES_MAX: u64 = 2 << 20;

/// The maximum number of frames in a message. Events have three, replays four.
const FRAMES_MAX: usize = 8;

/// The maximum size of a command. READY names the type of the socket and little more.
const COMMAND_BYTES_MAX: u64 = 4 << 10;

/// The number of bytes for which room is reserved before they arrive.
const RESERVED_BYTES: u64 = 16 << 10;

/// The maximum number of bytes that are read from one engine in a second. An engine that computes
/// 100,000 tokens per second sends a quarter of that. What an engine sends beyond waits at the
/// engine, and is lost there when its own queue is full.
pub const BYTES_PER_SECOND_MAX: u64 = 4 << 20;

/// How many bytes a frame counts for besides its own, so that empty frames are limited too: some
/// 1,000 messages per second, ten times as many as an engine has steps.
const FRAME_COST: u64 = 1 << 10;

/// The maximum time from the first header of a message to its last byte. Otherwise many publishers
/// that pause within a message would keep its memory for ever. The largest message needs half a
/// second of the bytes that are read from one engine.
const MESSAGE_WAIT: Duration = Duration::from_secs(10);

const IS_CONTINUED: u8 = 0b001;
const IS_LONG: u8 = 0b010;
const IS_COMMAND: u8 = 0b100;

/// The type of our socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZmtpRole {
    /// Receives what a publisher sends.
    Subscriber,
    /// Sends requests to a router and receives its replies.
    Dealer,
}

/// The reason why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the peer does not speak ZMTP 3")]
    Greeting,
    #[error("the peer demands the security mechanism {0:?}; only NULL is supported")]
    Mechanism(String),
    #[error("the peer did not become ready")]
    NotReady,
    #[error("a frame of {0} bytes is over the limit")]
    FrameTooLong(u64),
    #[error("a message has more than {max} frames", max = FRAMES_MAX)]
    TooManyFrames,
    #[error("a message that has begun did not end within {} s", MESSAGE_WAIT.as_secs())]
    TooSlow,
}

/// The bytes that may be read in the present second.
#[derive(Debug)]
pub struct ByteBudget {
    ends: Instant,
    left: u64,
}

/// A connection after its handshake.
#[derive(Debug)]
pub struct ZmtpConnection<S> {
    stream: BufReader<S>,
}

/// What comes before the body of a frame.
struct FrameHeader {
    flags: u8,
    bytes: u64,
}

// === impl ByteBudget ===

impl ByteBudget {
    const PERIOD: Duration = Duration::from_secs(1);

    #[must_use]
    pub fn full() -> Self {
        Self {
            ends: Instant::now() + Self::PERIOD,
            left: BYTES_PER_SECOND_MAX,
        }
    }

    /// Waits until this many bytes may be read. Messages are smaller than the bytes of a second, so
    /// the wait is at most a second.
    async fn spend(&mut self, bytes: u64) {
        if self.left < bytes {
            sleep_until(self.ends).await;
        }
        if Instant::now() >= self.ends {
            *self = Self::full();
        }
        self.left = self.left.saturating_sub(bytes);
    }
}

// === impl ZmtpRole ===

impl ZmtpRole {
    fn socket_type(self) -> &'static [u8] {
        match self {
            Self::Subscriber => b"SUB",
            Self::Dealer => b"DEALER",
        }
    }
}

// === impl ZmtpConnection ===

impl<S: AsyncRead + AsyncWrite + Unpin> ZmtpConnection<S> {
    /// Makes the handshake. A subscriber then subscribes to all topics.
    ///
    /// # Errors
    /// Returns [`ZmtpError`] if the connection breaks or the peer is no fitting ZeroMQ socket.
    pub async fn open(stream: S, role: ZmtpRole) -> Result<Self, ZmtpError> {
        let mut stream = BufReader::new(stream);
        stream.write_all(&greeting()).await?;
        stream.flush().await?;
        let mut theirs = [0; 64];
        stream.read_exact(&mut theirs).await?;
        check_greeting(&theirs)?;
        let mut connection = Self { stream };
        connection.send_frame(IS_COMMAND, &ready(role)).await?;
        connection.stream.flush().await?;
        let header = connection.header().await?;
        if header.flags & IS_COMMAND == 0 || header.bytes > COMMAND_BYTES_MAX {
            return Err(ZmtpError::NotReady);
        }
        let command = connection.body(header.bytes).await?;
        if !command.starts_with(b"\x05READY") {
            return Err(ZmtpError::NotReady);
        }
        if role == ZmtpRole::Subscriber {
            connection.send(&[&[1]]).await?; // subscribes to topics that begin with nothing
        }
        Ok(connection)
    }

    /// Sends a message of these frames, each of at most 255 bytes.
    ///
    /// # Errors
    /// Returns [`ZmtpError`] if the connection breaks.
    pub async fn send(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        for (position, frame) in frames.iter().enumerate() {
            let flags = if position + 1 < frames.len() {
                IS_CONTINUED
            } else {
                0
            };
            self.send_frame(flags, frame).await?;
        }
        Ok(self.stream.flush().await?)
    }

    /// Returns the frames of the next message, and leaves out commands. The call is not
    /// cancel-safe: if it is dropped, the connection is of no use any more.
    ///
    /// # Errors
    /// Returns [`ZmtpError`] if the connection breaks or the message exceeds a limit.
    pub async fn receive(&mut self, budget: &mut ByteBudget) -> Result<Vec<Vec<u8>>, ZmtpError> {
        loop {
            let first = self.header().await?;
            let rest = timeout(MESSAGE_WAIT, self.rest(first, budget)).await;
            if let Some(frames) = rest.map_err(|_| ZmtpError::TooSlow)?? {
                return Ok(frames);
            }
        }
    }

    /// Receives the rest of a message after its first header. Returns `None` for a command that
    /// comes before a message.
    async fn rest(
        &mut self,
        mut header: FrameHeader,
        budget: &mut ByteBudget,
    ) -> Result<Option<Vec<Vec<u8>>>, ZmtpError> {
        let mut frames = Vec::new();
        let mut room = MESSAGE_BYTES_MAX;
        loop {
            let FrameHeader { flags, bytes } = header;
            let is_command = flags & IS_COMMAND != 0;
            let most = if is_command { COMMAND_BYTES_MAX } else { room };
            if bytes > most {
                return Err(ZmtpError::FrameTooLong(bytes));
            }
            budget.spend(bytes + FRAME_COST).await;
            let body = self.body(bytes).await?;
            if !is_command {
                if frames.len() == FRAMES_MAX {
                    return Err(ZmtpError::TooManyFrames);
                }
                room -= bytes;
                frames.push(body);
                if flags & IS_CONTINUED == 0 {
                    return Ok(Some(frames));
                }
            } else if frames.is_empty() {
                return Ok(None);
            }
            header = self.header().await?;
        }
    }

    async fn header(&mut self) -> Result<FrameHeader, ZmtpError> {
        let flags = self.stream.read_u8().await?;
        let bytes = if flags & IS_LONG == 0 {
            self.stream.read_u8().await?.into()
        } else {
            self.stream.read_u64().await?
        };
        Ok(FrameHeader { flags, bytes })
    }

    async fn body(&mut self, bytes: u64) -> Result<Vec<u8>, ZmtpError> {
        let reserved = usize::try_from(bytes.min(RESERVED_BYTES)).unwrap_or_default();
        let mut body = Vec::with_capacity(reserved);
        let read = (&mut self.stream)
            .take(bytes)
            .read_to_end(&mut body)
            .await?;
        if u64::try_from(read).ok() != Some(bytes) {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(body)
    }

    async fn send_frame(&mut self, flags: u8, body: &[u8]) -> Result<(), ZmtpError> {
        let bytes =
            u8::try_from(body.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.stream.write_all(&[flags, bytes]).await?;
        Ok(self.stream.write_all(body).await?)
    }
}

/// Returns our greeting: ZMTP 3.0, mechanism NULL, as a client.
fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn check_greeting(greeting: &[u8; 64]) -> Result<(), ZmtpError> {
    if greeting[0] != 0xff || greeting[9] != 0x7f || greeting[10] < 3 {
        return Err(ZmtpError::Greeting);
    }
    let mechanism = &greeting[12..32];
    let length = mechanism.iter().position(|&byte| byte == 0);
    let name = &mechanism[..length.unwrap_or(mechanism.len())];
    if name != b"NULL" {
        return Err(ZmtpError::Mechanism(
            String::from_utf8_lossy(name).into_owned(),
        ));
    }
    Ok(())
}

/// Returns the body of the command READY.
fn ready(role: ZmtpRole) -> Vec<u8> {
    let name = b"Socket-Type";
    let value = role.socket_type();
    let mut body = b"\x05READY".to_vec();
    body.push(name.len() as u8);
    body.extend(name);
    body.extend((value.len() as u32).to_be_bytes());
    body.extend(value);
    body
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// The bytes of a peer that is ready: its greeting and its command READY.
    fn handshake() -> Vec<u8> {
        let ready = b"\x05READY\x0bSocket-Type\0\0\0\x03PUB";
        let mut bytes = greeting().to_vec();
        bytes.extend([IS_COMMAND, u8::try_from(ready.len()).unwrap()]);
        bytes.extend(ready);
        bytes
    }

    /// Opens a connection to a peer that sends its handshake and then `bytes`, and closes.
    async fn open(bytes: &[u8]) -> Result<ZmtpConnection<DuplexStream>, ZmtpError> {
        let (ours, mut theirs) = duplex(1 << 16);
        theirs.write_all(bytes).await.unwrap();
        let opened = ZmtpConnection::open(ours, ZmtpRole::Subscriber);
        let opened = tokio::time::timeout(PATIENCE, opened).await.unwrap();
        theirs.shutdown().await.unwrap();
        // The half that the peer writes to must stay, or our subscription could not be sent.
        tokio::spawn(async move {
            let mut rest = Vec::new();
            theirs.read_to_end(&mut rest).await
        });
        opened
    }

    async fn receive(bytes: &[u8]) -> Result<Vec<Vec<u8>>, ZmtpError> {
        let mut connection = open(&[handshake().as_slice(), bytes].concat()).await?;
        connection.receive(&mut ByteBudget::full()).await
    }

    #[tokio::test]
    async fn a_subscriber_sends_greeting_ready_and_subscription() {
        let (ours, mut theirs) = duplex(1 << 16);
        theirs.write_all(&handshake()).await.unwrap();
        ZmtpConnection::open(ours, ZmtpRole::Subscriber)
            .await
            .unwrap();
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).await.unwrap();
        let (greeted, rest) = sent.split_at(64);
        assert_eq!(greeted, greeting());
        assert_eq!(
            rest,
            b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\0\x01\x01"
        );
    }

    #[tokio::test]
    async fn a_message_of_short_and_long_frames_is_received_and_commands_are_left_out() {
        let mut bytes = vec![IS_CONTINUED, 2, b'k', b'v', IS_COMMAND, 1, 9];
        bytes.extend([IS_LONG, 0, 0, 0, 0, 0, 0, 1, 0]);
        bytes.extend([7; 256]);
        let frames = receive(&bytes).await.unwrap();
        assert_eq!(frames, [b"kv".to_vec(), vec![7; 256]]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_publisher_may_pause_between_messages_and_not_within_one() {
        let (ours, mut theirs) = duplex(1 << 16);
        theirs.write_all(&handshake()).await.unwrap();
        let opened = ZmtpConnection::open(ours, ZmtpRole::Subscriber).await;
        let mut connection = opened.unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(MESSAGE_WAIT * 6).await;
            theirs.write_all(&[IS_COMMAND, 1, 9]).await.unwrap();
            tokio::time::sleep(MESSAGE_WAIT * 6).await;
            theirs.write_all(&[0, 1, b'k', 0, 2, b'v']).await.unwrap();
            tokio::time::sleep(MESSAGE_WAIT * 6).await;
        });
        let mut budget = ByteBudget::full();
        let frames = connection.receive(&mut budget).await.unwrap();
        assert_eq!(frames, [b"k"]);
        let began = Instant::now();
        let broken = connection.receive(&mut budget).await.unwrap_err();
        assert!(matches!(broken, ZmtpError::TooSlow), "{broken}");
        assert_eq!(began.elapsed(), MESSAGE_WAIT);
    }

    #[tokio::test]
    async fn a_frame_that_announces_too_much_is_refused_before_it_is_read() {
        for announced in [MESSAGE_BYTES_MAX + 1, 1 << 40, u64::MAX] {
            let mut bytes = vec![IS_LONG];
            bytes.extend(announced.to_be_bytes());
            let refused = receive(&bytes).await.unwrap_err();
            assert!(
                matches!(refused, ZmtpError::FrameTooLong(bytes) if bytes == announced),
                "{refused}"
            );
        }
        let mut bytes = vec![IS_COMMAND | IS_LONG];
        bytes.extend((COMMAND_BYTES_MAX + 1).to_be_bytes());
        assert!(receive(&bytes).await.is_err());
    }

    #[tokio::test]
    async fn frames_without_end_are_refused() {
        let bytes = [IS_CONTINUED, 1, 0].repeat(FRAMES_MAX + 1);
        let refused = receive(&bytes).await.unwrap_err();
        assert!(matches!(refused, ZmtpError::TooManyFrames), "{refused}");
    }

    #[tokio::test]
    async fn other_peers_are_refused() {
        let mut encrypted = greeting();
        encrypted[12..17].copy_from_slice(b"CURVE");
        let mut old = greeting();
        old[10] = 2;
        let mut unready = greeting().to_vec();
        unready.extend(*b"\x04\x06\x05ERROR");
        let mut greedy = greeting().to_vec();
        greedy.extend([IS_COMMAND | IS_LONG, 255, 255, 255, 255, 255, 255, 255, 255]);
        for (bytes, why) in [
            (
                encrypted.to_vec(),
                "the peer demands the security mechanism \"CURVE\"; only NULL is supported",
            ),
            (old.to_vec(), "the peer does not speak ZMTP 3"),
            ([b'H'; 64].to_vec(), "the peer does not speak ZMTP 3"),
            (unready, "the peer did not become ready"),
            (greedy, "the peer did not become ready"),
        ] {
            let refused = open(&bytes).await.unwrap_err();
            assert_eq!(refused.to_string(), why);
        }
    }

    #[tokio::test]
    async fn a_connection_that_ends_within_a_message_is_an_error() {
        let mut bytes = handshake();
        bytes.extend([IS_CONTINUED, 1, 0, 0, 200, 1, 2, 3]);
        for end in handshake().len()..bytes.len() {
            assert!(
                receive(&bytes[handshake().len()..end]).await.is_err(),
                "{end}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_read_at_its_limited_rate() {
        let start = Instant::now();
        let mut budget = ByteBudget::full();
        for _ in 0..5 * BYTES_PER_SECOND_MAX / MESSAGE_BYTES_MAX {
            budget.spend(MESSAGE_BYTES_MAX).await;
        }
        assert_eq!(start.elapsed().as_secs(), 4);
    }
}
