//! Finds the JSON inside the gRPC requests of Vertex AI: one frame holds `{endpoint = 1, http_body
//! = 2}`, and `http_body` holds `{content_type = 1, data = 2}`.

/// The number of the field `http_body` in the request, and of the field `data` in the body.
const HTTP_BODY: u64 = 2;
const DATA: u64 = 2;

/// Returns the data of the request's HTTP body; `None` if the frame is compressed, incomplete, or
/// has no such message.
pub(super) fn json(body: &[u8]) -> Option<&[u8]> {
    let (&[compressed, length @ ..], message) = body.split_first_chunk::<5>()?;
    let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
    if compressed != 0 || message.len() != length {
        return None;
    }
    bytes_field(bytes_field(message, HTTP_BODY)?, DATA)
}

/// Returns the bytes of the last field with this number.
fn bytes_field(mut message: &[u8], number: u64) -> Option<&[u8]> {
    let mut found = None;
    while !message.is_empty() {
        let (tag, rest) = varint(message)?;
        let (value, rest) = match tag & 7 {
            0 => (&[][..], varint(rest)?.1),
            1 => rest.split_at_checked(8)?,
            2 => {
                let (length, rest) = varint(rest)?;
                rest.split_at_checked(usize::try_from(length).ok()?)?
            }
            5 => rest.split_at_checked(4)?,
            _ => return None,
        };
        if tag == number << 3 | 2 {
            found = Some(value);
        }
        message = rest;
    }
    found
}

/// Reads a varint (seven bits in each byte, the lowest first), and returns it with the bytes after
/// it.
fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (index, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, bytes.get(index + 1..)?));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let length = u16::try_from(bytes.len()).unwrap();
        let length = [(length & 0x7f) as u8 | 0x80, (length >> 7) as u8];
        [&[number << 3 | 2][..], &length, bytes].concat()
    }

    fn frame(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, message].concat()
    }

    #[test]
    fn a_length_may_take_several_bytes() {
        let text = "x".repeat(300);
        assert_eq!(
            json(&frame(&field(2, &field(2, text.as_bytes())))),
            Some(text.as_bytes())
        );
    }

    #[test]
    fn json_is_found_inside_two_messages() {
        let http_body = [field(1, b"application/json"), field(2, b"{}")].concat();
        let fixed = [
            &[3 << 3 | 1][..],
            &[9; 8],
            &[4 << 3 | 5],
            &[9; 4],
            &[5 << 3, 0xff, 0x01],
        ]
        .concat();
        let request = frame(
            &[
                field(1, b"projects/p/endpoints/e"),
                fixed,
                field(2, &http_body),
            ]
            .concat(),
        );
        assert_eq!(json(&request), Some(&b"{}"[..]));
        for end in 0..request.len() {
            assert_eq!(json(&request[..end]), None, "cut at {end}");
        }
        let mut compressed = request;
        compressed[0] = 1;
        assert_eq!(json(&compressed), None);
        assert_eq!(json(&frame(&field(1, b"x"))), None, "no body");
        assert_eq!(json(&frame(&[0xff; 20])), None, "no varint is that long");
        assert_eq!(
            json(&frame(&[
                2 << 3 | 2,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0xff,
                0x01
            ])),
            None
        );
        assert_eq!(json(&frame(&[3 << 3 | 3])), None, "groups are no more");
    }
}
