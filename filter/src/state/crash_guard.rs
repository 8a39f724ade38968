//! Messages that must not be decoded again, because a VM was lost while decoding them.
//!
//! The leader decodes each message before the other VMs, under a mark in shared data. A leader that
//! traps leaves its mark; the next one finds it and from then on refuses messages with that
//! content. Losing a VM fails all streams of a worker, so after each loss the leader also stays
//! away from the daemon for a while, longer each time: content that keeps changing can kill only so
//! often.

use exchange::Timestamp;

use super::words;
use crate::host::{Host, WriteCondition};

/// The mark of the message that is being decoded: [VM, digest].
const MARK: &str = "switchpoint/1/decoding";
/// The losses: [time of the last, digest of each, newest first].
const KEY: &str = "switchpoint/1/crash_guard";
/// How many digests are remembered: each stands for a lost VM, and a daemon that sends so many
/// different ones has another problem.
const CRASH_GUARD_MAX: usize = 8;
/// The pause after the first loss, in ms; it doubles with each further one.
const PAUSE_MS: u64 = 10_000;

/// Fields that differ each time the same is sent, as the way to them from [`proto::state::DaemonMessage`]: versions, sequences and ages.
const VOLATILE: &[&[u32]] = &[&[2, 2], &[2, 3, 7], &[3, 2], &[3, 3]];

/// Which messages crashed a VM that decoded them, as far as a leader knows.
#[derive(Debug, Default)]
pub struct CrashGuard {
    lost_at: Timestamp,
    digests: Vec<u64>,
}

// === impl CrashGuard ===

impl CrashGuard {
    /// Reads what former leaders met, when a VM becomes leader. The second value says whether the
    /// last of them was lost to a message.
    #[must_use]
    pub fn load<H: Host>(host: &H, vm: u64, now: Timestamp) -> (Self, bool) {
        let mut crash_guard = match read(host, KEY).split_first() {
            Some((lost_at, digests)) => Self { lost_at: Timestamp(*lost_at), digests: digests.to_vec() },
            None => Self::default(),
        };
        let lost = match read(host, MARK).as_slice() {
            &[holder, digest] if holder != vm => {
                crash_guard.record_crash(host, digest, now);
                true
            }
            _ => false,
        };
        let _ = host.share(MARK, &[], WriteCondition::Any);
        (crash_guard, lost)
    }

    /// When the daemon may be contacted again.
    #[must_use]
    pub fn pause_ends(&self) -> Timestamp {
        match u32::try_from(self.digests.len()) {
            Ok(losses @ 1..) => self.lost_at.plus_ms(PAUSE_MS << losses.saturating_sub(1).min(16)),
            _ => Timestamp(0),
        }
    }

    /// Decodes under the mark; `None` when the message crashed a VM before.
    pub fn decode_guarded<H: Host, T>(&self, host: &H, vm: u64, message: &[u8], decode: impl FnOnce() -> T) -> Option<T> {
        let digest = content(message);
        if self.digests.contains(&digest) {
            return None;
        }
        let _ = host.share(MARK, &words::write(&[vm, digest], &[]), WriteCondition::Any);
        let decoded = decode();
        let _ = host.share(MARK, &[], WriteCondition::Any);
        Some(decoded)
    }

    fn record_crash<H: Host>(&mut self, host: &H, digest: u64, now: Timestamp) {
        self.lost_at = now;
        self.digests.retain(|d| *d != digest);
        self.digests.insert(0, digest);
        self.digests.truncate(CRASH_GUARD_MAX);
        let row: Vec<u64> = std::iter::once(now.0).chain(self.digests.iter().copied()).collect();
        let _ = host.share(KEY, &words::write(&row, &[]), WriteCondition::Any);
    }
}

fn read<H: Host>(host: &H, key: &str) -> Vec<u64> {
    let bytes = host.shared(key).ok().flatten().map(|shared| shared.bytes).unwrap_or_default();
    let (words, _) = bytes.as_chunks::<{ words::WORD }>();
    words.iter().take(CRASH_GUARD_MAX.saturating_add(1)).map(|word| u64::from_le_bytes(*word)).collect()
}

/// A digest of a message without what differs each time it is sent; for bytes that are no message,
/// a digest of the bytes. It only knows how to skip a field, so nothing in it can fail the way
/// decoding did.
fn content(message: &[u8]) -> u64 {
    let mut lasting = Vec::with_capacity(message.len());
    match collect(message, &mut Vec::new(), &mut lasting) {
        Some(()) => words::digest(&lasting),
        None => words::digest(message),
    }
}

/// Appends the lasting fields of the message at `path`; `None` where the bytes are no fields.
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
        if VOLATILE.iter().any(|way| way.len() > path.len() && way.starts_with(path)) {
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
    Some((digits.iter().rev().fold(0, |value, digit| (value << 7) | u64::from(digit & 0x7f)), rest))
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
        assert_eq!(first.decode_guarded(&host, 1, &pool_update(1, "10.0.0.1:1"), || 1), Some(1));
        // The VM traps while it decodes: its mark at that moment stays.
        let mut mark = None;
        first.decode_guarded(&host, 1, &pool_update(2, "10.6.6.6:1"), || mark = host.shared(MARK).unwrap());
        host.share(MARK, &mark.unwrap().bytes, WriteCondition::Any).unwrap();

        let (second, lost) = CrashGuard::load(&host, 2, NOW);
        assert!(lost);
        assert_eq!(
            second.decode_guarded(&host, 2, &pool_update(3, "10.6.6.6:1"), || 1),
            None,
            "the daemon sends it again as another version"
        );
        assert_eq!(second.decode_guarded(&host, 2, &pool_update(4, "10.0.0.1:1"), || 1), Some(1));

        let (third, lost) = CrashGuard::load(&host, 3, NOW);
        assert!(!lost, "one loss is counted once");
        assert_eq!(third.decode_guarded(&host, 3, &pool_update(5, "10.6.6.6:1"), || 1), None, "and remembered");
    }

    #[test]
    fn each_loss_buys_a_longer_pause() {
        let host = FakeHost::new();
        assert_eq!(CrashGuard::load(&host, 1, NOW).0.pause_ends(), Timestamp(0));
        for (digest, seconds) in [(1_u64, 10), (2, 20), (3, 40)] {
            host.share(MARK, &words::write(&[1000, digest], &[]), WriteCondition::Any).unwrap();
            assert_eq!(CrashGuard::load(&host, 1, NOW).0.pause_ends(), NOW.plus_ms(seconds * 1_000));
        }
    }

    #[test]
    fn what_differs_each_time_is_not_content() {
        assert_eq!(content(&pool_update(1, "10.0.0.1:1")), content(&pool_update(99, "10.0.0.1:1")));
        assert_ne!(content(&pool_update(1, "10.0.0.1:1")), content(&pool_update(1, "10.0.0.1:2")));
        let metrics = |sequence, queue| metrics_message("p", Version { term: 1, sequence }, sequence, &[queue]);
        assert_eq!(content(&metrics(1, 5.0)), content(&metrics(9, 5.0)));
        assert_ne!(content(&metrics(1, 5.0)), content(&metrics(1, 6.0)));
        assert_eq!(content(b"\xff\xff"), words::digest(b"\xff\xff"));
    }

    #[test]
    fn a_vm_that_leaders_again_is_not_its_own_victim() {
        let host = FakeHost::new();
        host.share(MARK, &words::write(&[7, 7], &[]), WriteCondition::Any).unwrap();
        assert!(!CrashGuard::load(&host, 7, NOW).1);
    }

    #[test]
    fn memory_of_crash_guard_is_bounded() {
        let host = FakeHost::new();
        for digest in 1..100_u64 {
            host.share(MARK, &words::write(&[1000, digest], &[]), WriteCondition::Any).unwrap();
            let (crash_guard, lost) = CrashGuard::load(&host, 1, NOW);
            assert!(lost && crash_guard.digests.len() <= CRASH_GUARD_MAX && crash_guard.digests[0] == digest);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_survived(bytes: Vec<u8>) {
            content(&bytes);
        }
    }
}
