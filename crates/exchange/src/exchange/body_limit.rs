//! Bodies that are refused before they are complete.

use super::{Exchange, ExchangePhase};
use crate::reply::{LocalReply, Refusal};
use crate::settings::ExchangeSettings;

// === impl Exchange ===

impl Exchange {
    /// Checks the length of a body that has, or will have, `bytes` bytes. Returns a reply if the
    /// body is too long.
    pub fn check_body_size(
        &mut self,
        settings: &ExchangeSettings,
        bytes: usize,
    ) -> Option<LocalReply> {
        let undecided = matches!(
            self.phase,
            ExchangePhase::Started | ExchangePhase::Buffering
        );
        (undecided && bytes > settings.body_limit_bytes)
            .then(|| self.refuse_body(&Refusal::TooLarge(settings.body_limit_bytes)))
    }

    /// Refuses the request before its pool is used. The pool counts the refusal at the end.
    pub(crate) fn refuse_body(&mut self, refusal: &Refusal) -> LocalReply {
        self.phase = ExchangePhase::Answered {
            uncounted: Some(refusal.reason()),
        };
        refusal.reply(self.family)
    }
}
