//! The long request bodies that Envoy keeps for retries. Envoy keeps a copy of a request until its
//! stream ends, also while the reply runs for minutes. So each host bounds their total size. A
//! request beyond it is sent without a retry, and Envoy keeps no copy.

/// All bodies that proxies keep for the retries of one host.
#[derive(Debug, Default)]
pub struct KeptBodies {
    /// Each client that has kept bodies, and their bytes.
    clients: Vec<(u64, usize)>,
    bytes: usize,
}

// === impl KeptBodies ===

impl KeptBodies {
    /// Whether no body is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    /// Counts a body of this client if there is room for it. A client may have half of what the
    /// others leave of `bytes_max`, and seven eighths while there is no other. So there is always
    /// room for another client.
    pub fn keep(&mut self, client: u64, bytes: usize, bytes_max: usize) -> bool {
        let known = self.clients.iter_mut().find(|(known, _)| *known == client);
        let before = known.as_ref().map_or(0, |(_, held)| *held);
        let of_others = self.bytes.saturating_sub(before);
        let held = before.saturating_add(bytes);
        let left = bytes_max.saturating_sub(of_others);
        if held > left.saturating_sub(left / if of_others == 0 { 8 } else { 2 }) {
            return false;
        }
        self.bytes = of_others.saturating_add(held);
        match known {
            Some(known) => known.1 = held,
            None => self.clients.push((client, held)),
        }
        true
    }

    /// Records that Envoy no longer keeps a body of this client.
    pub fn release(&mut self, client: u64, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.clients.retain_mut(|(known, held)| {
            if *known == client {
                *held = held.saturating_sub(bytes);
            }
            *held > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: usize = 64 << 20;
    const BODY: usize = 1 << 20;

    #[test]
    fn a_client_has_half_of_what_the_others_leave_and_seven_eighths_without_others() {
        let mut kept = KeptBodies::default();
        let mut keep_all = |client| (0..99).filter(|_| kept.keep(client, BODY, MAX)).count();
        assert_eq!([1, 2, 3, 1].map(&mut keep_all), [56, 4, 2, 0]);
        assert_eq!(kept.bytes, 62 * BODY);
        kept.release(3, BODY);
        assert!(kept.keep(3, BODY, MAX));
        assert!(!kept.keep(3, BODY, MAX));
        for (client, bodies) in [(1, 40), (2, 4), (3, 2)] {
            (0..bodies).for_each(|_| kept.release(client, BODY));
        }
        assert_eq!(kept.bytes, 16 * BODY);
        assert!(kept.keep(2, 24 * BODY, MAX), "half of 48");
        assert!(!kept.keep(1, 5 * BODY, MAX), "21 of 40");
        (0..16).for_each(|_| kept.release(1, BODY));
        kept.release(2, 24 * BODY);
        assert!(kept.is_empty());
        assert_eq!(kept.bytes, 0);
    }
}
