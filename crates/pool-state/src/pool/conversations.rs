//! Measures how many requests a conversation has. If several conversations begin with the same
//! prefix, a cached copy of it serves all requests of each.

use scheduler::prefix::REQUESTED_ONCE;

/// With each newer prompt, the weight of a prompt falls by one part in this many.
const PROMPTS: f32 = 256.0;

/// The share of prompts that continue a conversation. Such a prompt begins with a prefix that was
/// requested once before.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConversationShare {
    /// The number of prompts that continue a conversation, with decay; `all` counts all prompts.
    continued: f32,
    all: f32,
}

// === impl ConversationShare ===

impl ConversationShare {
    /// Records a prompt. Its longest cached prefix is requested once in `reuse_interval` prompts.
    pub(super) fn record(&mut self, reuse_interval: f32, is_cold: bool) {
        let keep = 1.0 - 1.0 / PROMPTS;
        let continues = !is_cold && reuse_interval >= REQUESTED_ONCE;
        self.continued = keep * self.continued + f32::from(u8::from(continues));
        self.all = keep * self.all + 1.0;
    }

    /// The interval between the requests that a new copy of a prefix serves, if the prefix is
    /// requested at `reuse_interval`, r. The copy serves the n requests of the conversation that
    /// begins with this request. Until the endpoint has computed another prompt, the copy also
    /// serves 1/r other requests. A conversation that continues may move again with its next
    /// request, so its copy is certain to serve only one request.
    pub(super) fn interval(&self, reuse_interval: f32) -> f32 {
        if reuse_interval >= REQUESTED_ONCE {
            return reuse_interval;
        }
        let others = 1.0 / reuse_interval.max(f32::MIN_POSITIVE);
        1.0 / (self.requests() - 1.0 + others)
    }

    /// The mean number of requests of a conversation, n; 1 before any prompt. If c is the share of
    /// prompts that continue, a conversation ends after each prompt with probability 1 - c, so n is
    /// 1 / (1 - c). The formula starts with one ended prompt, so one prompt that continues makes n
    /// at most 2.
    fn requests(&self) -> f32 {
        (self.all + 1.0) / (self.all - self.continued + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of a new copy's cost that one request pays: r / (1 + r).
    fn paid(conversations: &ConversationShare, reuse_interval: f32) -> f32 {
        let interval = conversations.interval(reuse_interval);
        interval / (1.0 + interval)
    }

    #[test]
    fn all_requests_of_a_conversation_pay_for_its_copy() {
        let mut conversations = ConversationShare::default();
        assert!(
            (paid(&conversations, 3.0) - 0.75).abs() < 1e-6,
            "without conversations r / (1 + r)"
        );
        for request in 0..4_000 {
            let begins = request % 4 == 0;
            conversations.record(if begins { 0.5 } else { REQUESTED_ONCE }, false);
        }
        let share = paid(&conversations, 0.5);
        assert!(
            (share - 1.0 / 6.0).abs() < 0.01,
            "four of this conversation and two others use it: {share}"
        );
        assert!(
            paid(&conversations, REQUESTED_ONCE) > 0.99,
            "a conversation that goes on pays its history"
        );
        assert!(paid(&conversations, 0.0) < 1e-6 && paid(&conversations, f32::MAX / 1e9) > 0.0);
    }

    #[test]
    fn prompts_that_are_cached_nowhere_begin_conversations() {
        let mut conversations = ConversationShare::default();
        (0..1_000).for_each(|_| conversations.record(REQUESTED_ONCE, true));
        assert!((conversations.requests() - 1.0).abs() < 1e-6);
        (0..100_000).for_each(|_| conversations.record(REQUESTED_ONCE, false));
        assert!(
            conversations.requests() <= PROMPTS + 1.0,
            "bounded, also where all go on"
        );
    }

    #[test]
    fn one_prompt_is_no_evidence_of_long_conversations() {
        let mut conversations = ConversationShare::default();
        conversations.record(REQUESTED_ONCE, false);
        assert!((conversations.requests() - 2.0).abs() < 1e-6);
    }
}
