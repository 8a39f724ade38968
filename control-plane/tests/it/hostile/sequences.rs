//! Random sequences of messages.

use proptest::prelude::*;

use super::sequence::play;

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    /// Checks that a peer gets its pool update, and nothing outside the limits, while other peers
    /// send any messages in any order.
    #[test]
    fn no_sequence_of_messages_breaks_a_promise_to_another_peer(bytes in prop::collection::vec(any::<u8>(), 0..1_500)) {
        play(&bytes);
    }
}
