//! Encodes several messages in one HTTP body. Before each message is its length: four bytes, least
//! significant first.

pub fn push(frames: &mut Vec<u8>, message: &[u8]) {
    // The size fits into 32 bits, because it is far below 4 GiB: see `MESSAGE_BYTES_MAX`.
    frames.extend(
        u32::try_from(message.len())
            .unwrap_or(u32::MAX)
            .to_le_bytes(),
    );
    frames.extend(message);
}

/// Splits off the first message; `None` if there is no complete message.
#[must_use]
pub fn take(frames: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = frames.split_first_chunk::<4>()?;
    rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_pushed_is_taken(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8)) {
            let mut frames = Vec::new();
            messages.iter().for_each(|message| push(&mut frames, message));
            let mut rest = frames.as_slice();
            for message in &messages {
                let (taken, after) = take(rest).unwrap();
                prop_assert_eq!(taken, message);
                prop_assert!(rest.len() < 5 || take(&rest[..rest.len() - after.len() - 1]).is_none(), "cut short");
                rest = after;
            }
            prop_assert!(rest.is_empty());
        }
    }

    #[test]
    fn what_is_no_frame_is_not_taken() {
        for bytes in [
            &b""[..],
            b"\x01\0\0",
            b"\x01\0\0\0",
            b"\xff\xff\xff\xffmessage",
        ] {
            assert_eq!(take(bytes), None);
        }
    }
}
