//! Refuses messages that have already crashed a VM while the VM decoded them.
//!
//! The leader decodes each message before the other VMs do. While it decodes, a mark in shared data
//! names the message. A leader that traps leaves its mark behind. The next leader finds the mark,
//! and from then on refuses messages with that content. The loss of a VM fails all streams of a
//! worker. So after each loss, the next leader also opens no connection to the daemon for a pause,
//! which grows with each loss. The pauses limit how often a message with always new content can
//! crash a VM.

use exchange::Timestamp;
use proto::shared_data::{CRASH_DIGESTS_MAX, CrashRecord, DecodingMark};

use crate::host::{Host, WriteCondition};

/// The key of the [`DecodingMark`].
const MARK: &str = "switchpoint/1/decoding";
/// The key of the [`CrashRecord`].
const KEY: &str = "switchpoint/1/crash_guard";
/// The pause after the first loss, in ms. The pause doubles with each further loss.
const PAUSE_MS: u64 = 10_000;

/// The fields that differ each time the daemon sends the same content: versions, sequences and
/// ages. Each field is a path of field numbers that begins at [`proto::state::DaemonMessage`].
const VOLATILE: &[&[u32]] = &[&[2, 2], &[2, 3, 7], &[3, 2], &[3, 3]];

/// The messages that are known to have crashed a VM while the VM decoded them.
#[derive(Debug, Default)]
pub struct CrashGuard {
    record: CrashRecord,
}

// === impl CrashGuard ===

impl CrashGuard {
    /// Reads the record of former leaders when a VM becomes leader. The second value says whether
    /// the last leader crashed while it decoded a message.
    #[must_use]
    pub fn load<H: Host>(host: &H, vm: u64, now: Timestamp) -> (Self, bool) {
        let mut crash_guard = Self {
            record: CrashRecord::from_bytes(&read(host, KEY)),
        };
        let mark = DecodingMark::from_bytes(&read(host, MARK)).filter(|mark| mark.vm != vm);
        if let Some(mark) = mark {
            crash_guard.record_crash(host, mark.digest, now);
        }
        let _ = host.share(MARK, &[], WriteCondition::Any);
        (crash_guard, mark.is_some())
    }

    /// Returns the time from which the leader may contact the daemon again.
    #[must_use]
    pub fn pause_ends(&self) -> Timestamp {
        match u32::try_from(self.record.digests.len()) {
            Ok(losses @ 1..) => self
                .record
                .lost_at
                .plus_ms(PAUSE_MS << losses.saturating_sub(1).min(16)),
            _ => Timestamp(0),
        }
    }

    /// Decodes a message while the mark in shared data names it. Returns `None` if the message has
    /// crashed a VM before.
    pub fn decode_guarded<H: Host, T>(
        &self,
        host: &H,
        vm: u64,
        message: &[u8],
        decode: impl FnOnce() -> T,
    ) -> Option<T> {
        let digest = content(message);
        if self.record.digests.contains(&digest) {
            return None;
        }
        let _ = host.share(
            MARK,
            &DecodingMark { vm, digest }.to_bytes(),
            WriteCondition::Any,
        );
        let decoded = decode();
        let _ = host.share(MARK, &[], WriteCondition::Any);
        Some(decoded)
    }

    fn record_crash<H: Host>(&mut self, host: &H, digest: u64, now: Timestamp) {
        self.record.lost_at = now;
        self.record.digests.retain(|d| *d != digest);
        self.record.digests.insert(0, digest);
        self.record.digests.truncate(CRASH_DIGESTS_MAX);
        let _ = host.share(KEY, &self.record.to_bytes(), WriteCondition::Any);
    }
}

fn read<H: Host>(host: &H, key: &str) -> Vec<u8> {
    host.shared(key)
        .ok()
        .flatten()
        .map(|shared| shared.bytes)
        .unwrap_or_default()
}

/// Returns a digest of a message without its [`VOLATILE`] fields. If the bytes are not a message,
/// returns a digest of the bytes. This function decodes no field, so it cannot crash like the
/// decoding.
fn content(message: &[u8]) -> u64 {
    let mut lasting = Vec::with_capacity(message.len());
    match collect(message, &mut Vec::new(), &mut lasting) {
        Some(()) => digest(&lasting),
        None => digest(message),
    }
}

/// Appends to `lasting` the fields of the message at `path` that are not in [`VOLATILE`]. Returns
/// `None` if the bytes are not fields.
fn collect(mut bytes: &[u8], path: &mut Vec<u32>, lasting: &mut Vec<u8>) -> Option<()> {
    while !bytes.is_empty() {
        let (tag, rest) = varint(bytes)?;
        let (value, rest) = match tag & 7 {
            0 => rest.split_at_checked(rest.len().checked_sub(varint(rest)?.1.len())?)?,
            1 => rest.split_at_checked(8)?,
            2 => {
                let (size, rest) = varint(rest)?;
                rest.split_at_checked(usize::try_from(size).ok()?)?
            }
            5 => rest.split_at_checked(4)?,
            _ => return None,
        };
        bytes = rest;
        path.push(u32::try_from(tag >> 3).ok()?);
        if VOLATILE
            .iter()
            .any(|way| way.len() > path.len() && way.starts_with(path))
        {
            collect(value, path, lasting)?;
        } else if !VOLATILE.contains(&path.as_slice()) {
            lasting.extend_from_slice(&tag.to_le_bytes());
            lasting.extend_from_slice(value);
        }
        path.pop();
    }
    Some(())
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let end = bytes.iter().take(10).position(|byte| byte & 0x80 == 0)?;
    let (digits, rest) = bytes.split_at_checked(end.checked_add(1)?)?;
    Some((
        digits
            .iter()
            .rev()
            .fold(0, |value, digit| (value << 7) | u64::from(digit & 0x7f)),
        rest,
    ))
}

/// Returns a digest that distinguishes messages: FNV-1a over words (the last word padded with
/// zeros) and the length. The digest is not cryptographic.
fn digest(bytes: &[u8]) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    let mix = |hash: u64, word: u64| (hash ^ word).wrapping_mul(PRIME).rotate_left(23);
    let (chunks, tail) = bytes.as_chunks::<{ proto::words::WORD }>();
    let hash = chunks
        .iter()
        .fold(BASIS, |hash, chunk| mix(hash, u64::from_le_bytes(*chunk)));
    let last = tail
        .iter()
        .rev()
        .fold(0, |word, &byte| (word << 8) | u64::from(byte));
    mix(mix(hash, last), bytes.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{FakeHost, metrics_message, pool_update_message};
    use scheduler::Version;

    const NOW: Timestamp = Timestamp(5_000_000_000);

    fn pool_update(sequence: u64, address: &str) -> Vec<u8> {
        pool_update_message("p", Version { term: 1, sequence }, &[address])
    }

    #[test]
    fn a_message_that_killed_one_vm_is_refused_by_the_next() {
        let host = FakeHost::new();
        let (first, lost) = CrashGuard::load(&host, 1, NOW);
        assert!(!lost);
        assert_eq!(
            first.decode_guarded(&host, 1, &pool_update(1, "10.0.0.1:1"), || 1),
            Some(1)
        );
        // The VM traps while it decodes, so its mark stays.
        let mut mark = None;
        first.decode_guarded(&host, 1, &pool_update(2, "10.6.6.6:1"), || {
            mark = host.shared(MARK).unwrap();
        });
        host.share(MARK, &mark.unwrap().bytes, WriteCondition::Any)
            .unwrap();

        let (second, lost) = CrashGuard::load(&host, 2, NOW);
        assert!(lost);
        assert_eq!(
            second.decode_guarded(&host, 2, &pool_update(3, "10.6.6.6:1"), || 1),
            None,
            "the daemon sends the content again as another version"
        );
        assert_eq!(
            second.decode_guarded(&host, 2, &pool_update(4, "10.0.0.1:1"), || 1),
            Some(1)
        );

        let (third, lost) = CrashGuard::load(&host, 3, NOW);
        assert!(!lost, "one loss is counted once");
        assert_eq!(
            third.decode_guarded(&host, 3, &pool_update(5, "10.6.6.6:1"), || 1),
            None,
            "the content stays refused"
        );
    }

    #[test]
    fn each_loss_buys_a_longer_pause() {
        let host = FakeHost::new();
        assert_eq!(CrashGuard::load(&host, 1, NOW).0.pause_ends(), Timestamp(0));
        for (digest, seconds) in [(1_u64, 10), (2, 20), (3, 40)] {
            host.share(
                MARK,
                &DecodingMark { vm: 1000, digest }.to_bytes(),
                WriteCondition::Any,
            )
            .unwrap();
            assert_eq!(
                CrashGuard::load(&host, 1, NOW).0.pause_ends(),
                NOW.plus_ms(seconds * 1_000)
            );
        }
    }

    #[test]
    fn what_differs_each_time_is_not_content() {
        assert_eq!(
            content(&pool_update(1, "10.0.0.1:1")),
            content(&pool_update(99, "10.0.0.1:1"))
        );
        assert_ne!(
            content(&pool_update(1, "10.0.0.1:1")),
            content(&pool_update(1, "10.0.0.1:2"))
        );
        let metrics = |sequence, queue| {
            metrics_message("p", Version { term: 1, sequence }, sequence, &[queue])
        };
        assert_eq!(content(&metrics(1, 5.0)), content(&metrics(9, 5.0)));
        assert_ne!(content(&metrics(1, 5.0)), content(&metrics(1, 6.0)));
        assert_eq!(content(b"\xff\xff"), digest(b"\xff\xff"));
    }

    #[test]
    fn a_vm_that_leads_again_ignores_its_own_mark() {
        let host = FakeHost::new();
        host.share(
            MARK,
            &DecodingMark { vm: 7, digest: 7 }.to_bytes(),
            WriteCondition::Any,
        )
        .unwrap();
        assert!(!CrashGuard::load(&host, 7, NOW).1);
    }

    #[test]
    fn memory_of_crash_guard_is_bounded() {
        let host = FakeHost::new();
        for digest in 1..100_u64 {
            host.share(
                MARK,
                &DecodingMark { vm: 1000, digest }.to_bytes(),
                WriteCondition::Any,
            )
            .unwrap();
            let (crash_guard, lost) = CrashGuard::load(&host, 1, NOW);
            assert!(
                lost && crash_guard.record.digests.len() <= CRASH_DIGESTS_MAX
                    && crash_guard.record.digests[0] == digest
            );
        }
    }

    #[test]
    fn digests_see_every_byte_and_the_length() {
        let base = vec![7_u8; 41];
        let mut all = vec![digest(&base), digest(&base[..40]), digest(&[])];
        for i in 0..base.len() {
            let mut other = base.clone();
            other[i] ^= 1;
            all.push(digest(&other));
        }
        all.push(digest(&[&base[..], &[0]].concat()));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            content(&bytes);
        }
    }
}
