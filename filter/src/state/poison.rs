//! Messages that must not be decoded again, because a VM was lost while it did.
//!
//! The leader decodes each message before anybody else, under a mark in shared data. A leader that traps leaves its mark; the next one finds it,
//! and refuses that message from then on. So a message that kills costs one VM, once.

use super::words;
use crate::host::{Expect, Host};

/// Where the mark of the message being decoded is: [VM, digest].
const MARK: &str = "switchpoint/1/decoding";
/// Where the digests of refused messages are.
const KEY: &str = "switchpoint/1/poison";
/// How many are remembered: each stands for a VM lost, and a daemon that sends so many different ones has other troubles.
const POISON_MAX: usize = 8;

/// What a leader knows of poison.
#[derive(Debug, Default)]
pub struct Poison {
    digests: Vec<u64>,
}

// === impl Poison ===

impl Poison {
    /// Reads what former leaders met, at the start of a lead. The second value says whether one of them was lost to a message.
    #[must_use]
    pub fn load<H: Host>(host: &H, vm: u64) -> (Self, bool) {
        let mut poison = Self { digests: read(host, KEY) };
        let lost = match read(host, MARK).as_slice() {
            &[holder, digest] if holder != vm => {
                poison.remember(host, digest);
                true
            }
            _ => false,
        };
        let _ = host.share(MARK, &[], Expect::Any);
        (poison, lost)
    }

    /// Decodes under the mark; `None` when the message is poison.
    pub fn guard<H: Host, T>(&self, host: &H, vm: u64, message: &[u8], decode: impl FnOnce() -> T) -> Option<T> {
        let digest = words::digest(message);
        if self.digests.contains(&digest) {
            return None;
        }
        let _ = host.share(MARK, &words::write(&[vm, digest], &[]), Expect::Any);
        let decoded = decode();
        let _ = host.share(MARK, &[], Expect::Any);
        Some(decoded)
    }

    fn remember<H: Host>(&mut self, host: &H, digest: u64) {
        self.digests.retain(|d| *d != digest);
        self.digests.insert(0, digest);
        self.digests.truncate(POISON_MAX);
        let _ = host.share(KEY, &words::write(&self.digests, &[]), Expect::Any);
    }
}

fn read<H: Host>(host: &H, key: &str) -> Vec<u64> {
    let bytes = host.shared(key).ok().flatten().map(|shared| shared.bytes).unwrap_or_default();
    let (words, _) = bytes.as_chunks::<{ words::WORD }>();
    words.iter().take(POISON_MAX).map(|word| u64::from_le_bytes(*word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::FakeHost;

    #[test]
    fn a_message_that_killed_one_vm_is_refused_by_the_next() {
        let host = FakeHost::new();
        let (first, lost) = Poison::load(&host, 1);
        assert!(!lost);
        assert_eq!(first.guard(&host, 1, b"fine", || 1), Some(1));
        // The VM traps while it decodes: what its mark was at that moment is what stays.
        let mut mark = None;
        first.guard(&host, 1, b"bad", || mark = host.shared(MARK).unwrap());
        host.share(MARK, &mark.unwrap().bytes, Expect::Any).unwrap();

        let (second, lost) = Poison::load(&host, 2);
        assert!(lost);
        assert_eq!(second.guard(&host, 2, b"bad", || 1), None);
        assert_eq!(second.guard(&host, 2, b"fine", || 1), Some(1));

        let (third, lost) = Poison::load(&host, 3);
        assert!(!lost, "one loss is counted once");
        assert_eq!(third.guard(&host, 3, b"bad", || 1), None, "and remembered");
    }

    #[test]
    fn a_vm_that_leads_again_is_not_its_own_victim() {
        let host = FakeHost::new();
        host.share(MARK, &words::write(&[7, 7], &[]), Expect::Any).unwrap();
        assert!(!Poison::load(&host, 7).1);
    }

    #[test]
    fn memory_of_poison_is_bounded() {
        let host = FakeHost::new();
        for digest in 1..100_u64 {
            host.share(MARK, &words::write(&[1000, digest], &[]), Expect::Any).unwrap();
            let (poison, lost) = Poison::load(&host, 1);
            assert!(lost && poison.digests.len() <= POISON_MAX && poison.digests[0] == digest);
        }
    }
}
