//! The frames of gRPC messages: a flag, the length in four bytes (most significant first), and the
//! message.

/// The length of a frame's head, in bytes.
const HEAD_BYTES: usize = 5;

/// Collects pieces of a stream, and returns the messages in them.
#[derive(Debug, Default)]
pub(crate) struct FrameReader(Vec<u8>);

// === impl FrameReader ===

impl FrameReader {
    pub(crate) fn push(&mut self, piece: &[u8]) {
        self.0.extend_from_slice(piece);
    }

    /// Returns the next complete message.
    ///
    /// # Errors
    /// Returns the reason if the stream cannot be read any more.
    pub(crate) fn next(&mut self) -> Result<Option<Vec<u8>>, &'static str> {
        let Some((&[flag, a, b, c, d], rest)) = self.0.split_first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        if flag != 0 {
            return Err("it compresses messages");
        }
        let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
        if length > proto::MESSAGE_BYTES_MAX {
            return Err("it sent a message that is too long");
        }
        if rest.len() < length {
            return Ok(None);
        }
        let after = self.0.split_off(HEAD_BYTES.saturating_add(length));
        let mut message = std::mem::replace(&mut self.0, after);
        message.drain(..HEAD_BYTES);
        Ok(Some(message))
    }
}

/// Returns the frame of a message.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    // The length fits, because a proxy's message is far shorter than 4 GiB.
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    [&[0][..], &length.to_be_bytes(), message].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_from_any_pieces() {
        let bytes = [framed(b"one"), framed(b""), framed(b"three")].concat();
        for size in 1..=bytes.len() {
            let mut reader = FrameReader::default();
            let mut read = Vec::new();
            for piece in bytes.chunks(size) {
                reader.push(piece);
                while let Some(message) = reader.next().unwrap() {
                    read.push(message);
                }
            }
            assert_eq!(read, [&b"one"[..], b"", b"three"], "pieces of {size}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let next = |bytes: &[u8]| {
            let mut reader = FrameReader::default();
            reader.push(bytes);
            reader.next()
        };
        assert_eq!(next(b"\0\0\0"), Ok(None));
        assert!(next(b"\x01\0\0\0\x01x").is_err(), "compressed");
        assert!(next(b"\0\xff\xff\xff\xff").is_err(), "too long");
    }
}
