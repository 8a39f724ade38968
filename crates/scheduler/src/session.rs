//! Endpoint names for session affinity: a token that clients send back, and a hash that is the same
//! on every host.

use crate::prefix::xxh64;

/// A response header that names an endpoint to the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionToken {
    /// The name of the header, lower-case.
    pub header: Box<str>,
    /// The profile whose pick the token names. If the name is empty, the token names the endpoint
    /// that served the request.
    pub profile: Box<str>,
}

/// Returns a hash of a name. The hash is the same on every host.
#[must_use]
pub fn name_hash(name: &str) -> u64 {
    xxh64(name.as_bytes())
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Returns the token that names an endpoint: its name in base64 (RFC 4648 §4, padded).
#[must_use]
pub fn session_token(name: &str) -> String {
    let mut token = String::with_capacity(name.len().div_ceil(3) * 4);
    for chunk in name.as_bytes().chunks(3) {
        let bits = chunk
            .iter()
            .fold(0_u32, |bits, &byte| bits << 8 | u32::from(byte))
            << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let digit = usize::try_from(bits >> (18 - 6 * place) & 63)
                .ok()
                .and_then(|digit| ALPHABET.get(digit));
            token.push(if place <= chunk.len() {
                digit.map_or('=', |&digit| char::from(digit))
            } else {
                '='
            });
        }
    }
    token
}

/// Decodes a token; `None` if the token is not valid.
pub(crate) fn decode_token(token: &str) -> Option<Vec<u8>> {
    let (quads, rest) = token.as_bytes().as_chunks::<4>();
    let (last, padded) = quads.split_last().filter(|_| rest.is_empty())?;
    let padding = last.iter().rev().take_while(|&&byte| byte == b'=').count();
    let mut name = Vec::with_capacity(quads.len() * 3);
    for quad in padded {
        name.extend_from_slice(quad_bytes(quad, 0)?.get(1..)?);
    }
    name.extend_from_slice(
        quad_bytes(last, padding)?.get(1..4_usize.checked_sub(padding).filter(|end| *end > 1)?)?,
    );
    Some(name)
}

/// Decodes four base64 digits to three bytes, which follow a leading zero byte. The last `padding`
/// digits count as zero.
fn quad_bytes(quad: &[u8; 4], padding: usize) -> Option<[u8; 4]> {
    let mut bits = 0_u32;
    for (at, byte) in quad.iter().enumerate() {
        let digit = if at + padding >= 4 {
            0
        } else {
            ALPHABET.iter().position(|digit| digit == byte)?
        };
        bits = bits << 6 | u32::try_from(digit).ok()?;
    }
    Some(bits.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tokens_are_base64() {
        for (name, token) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("default/pod-1", "ZGVmYXVsdC9wb2QtMQ=="),
        ] {
            assert_eq!(session_token(name), token, "RFC 4648 §10, and a pod");
        }
    }

    #[test]
    fn an_invalid_token_names_no_endpoint() {
        for bad in [
            "",
            "Zg",
            "Zg=",
            "Zg===",
            "====",
            "Z===",
            "Zm9v=",
            "Zm 9",
            "Zm9vZm9v!",
            "Zg==Zg==",
            "é===",
        ] {
            assert_eq!(decode_token(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_token_names_its_endpoint(name in ".{1,40}") {
            prop_assert_eq!(decode_token(&session_token(&name)), Some(name.into_bytes()));
        }

        #[test]
        fn any_token_is_read_without_harm(token in ".{0,40}") {
            let _ = decode_token(&token);
        }
    }
}
