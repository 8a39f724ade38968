//! Sequences of messages at random.

use proptest::prelude::*;

use super::sequence::play;

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]
    /// Whatever some peers say, in whatever order: another one has its pool update, and is told nothing out of bounds.
    #[test]
    fn no_sequence_of_messages_breaks_a_promise_to_another_peer(bytes in prop::collection::vec(any::<u8>(), 0..1_500)) {
        play(&bytes);
    }
}
