//! Random sequences of messages.

use proptest::prelude::*;

use super::sequence::play;

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    /// Whatever messages some peers send, in any order: another peer has its pool update and gets
    /// nothing outside the limits.
    #[test]
    fn no_sequence_of_messages_breaks_a_promise_to_another_peer(bytes in prop::collection::vec(any::<u8>(), 0..1_500)) {
        play(&bytes);
    }
}
