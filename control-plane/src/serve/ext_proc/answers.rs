//! The answers of a stream, in order. A body is cut into messages only as they are taken.

use std::collections::VecDeque;

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::held_body::BodyPieces;
use super::wire::{self, BodyDirection, HeaderChanges};

/// A queue of answers.
#[derive(Debug, Default)]
pub struct AnswerQueue(VecDeque<ExtProcAnswer>);

#[derive(Debug)]
enum ExtProcAnswer {
    /// A message, and how long the body in it is.
    Message(Box<ProcessingResponse>, usize),
    Body(AnswerBody),
}

/// A body, piece by piece.
#[derive(Debug)]
pub struct AnswerBody {
    /// The pieces.
    pub pieces: BodyPieces,
    /// Request or response.
    pub direction: BodyDirection,
    /// The pieces are all that goes on; otherwise each answers one that came.
    pub duplex: bool,
    /// The body's end comes with the last.
    pub ends: bool,
}

// === impl AnswerQueue ===

impl AnswerQueue {
    /// A message with a body of so many bytes in it.
    pub fn push(&mut self, message: ProcessingResponse, body_bytes: usize) {
        self.0.push_back(ExtProcAnswer::Message(Box::new(message), body_bytes));
    }

    /// A body.
    pub fn push_body(&mut self, body: AnswerBody) {
        self.0.push_back(ExtProcAnswer::Body(body));
    }

    /// Takes the next message out.
    pub fn next(&mut self) -> Option<ProcessingResponse> {
        loop {
            if let ExtProcAnswer::Body(body) = self.0.front_mut()?
                && let Some((message, last)) = body.next()
            {
                if last {
                    self.0.pop_front();
                }
                return Some(message);
            }
            if let ExtProcAnswer::Message(message, _) = self.0.pop_front()? {
                return Some(*message);
            }
        }
    }

    /// How much memory they take, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        let each = self.0.iter().map(|answer| match answer {
            ExtProcAnswer::Message(_, body_bytes) => size_of::<ProcessingResponse>() + body_bytes,
            ExtProcAnswer::Body(body) => body.pieces.memory(),
        });
        each.sum()
    }

    /// Is nothing left to send?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops all of them.
    pub fn clear(&mut self) {
        self.0.clear();
    }
}

// === impl AnswerBody ===

impl AnswerBody {
    /// The next message, and whether it is the last.
    fn next(&mut self) -> Option<(ProcessingResponse, bool)> {
        let piece = self.pieces.next()?;
        let message = if self.duplex {
            wire::streamed_body(self.direction, piece.bytes, piece.last && self.ends)
        } else {
            wire::body_answer(self.direction, piece.changed.then_some(piece.bytes), HeaderChanges::default())
        };
        Some((message, piece.last))
    }
}
