//! The answers of a stream, in order. A body is cut into messages only when they are taken.

use std::collections::VecDeque;

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::held_body::BodyPieces;
use super::wire::{self, BodyDirection, HeaderChanges};

#[derive(Debug, Default)]
pub struct AnswerQueue(VecDeque<ExtProcAnswer>);

#[derive(Debug)]
enum ExtProcAnswer {
    /// A message, and the length of the body in it.
    Message(Box<ProcessingResponse>, usize),
    Body(AnswerBody),
}

/// A body, piece by piece.
#[derive(Debug)]
pub struct AnswerBody {
    pub pieces: BodyPieces,
    /// Request or response.
    pub direction: BodyDirection,
    /// Whether the mode is full duplex, where Envoy forwards only these pieces. Otherwise each
    /// piece answers one that Envoy sent.
    pub duplex: bool,
    /// Whether the last piece ends the body.
    pub ends: bool,
}

// === impl AnswerQueue ===

impl AnswerQueue {
    /// Appends a message that has a body of `body_bytes` bytes.
    pub fn push(&mut self, message: ProcessingResponse, body_bytes: usize) {
        self.0
            .push_back(ExtProcAnswer::Message(Box::new(message), body_bytes));
    }

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

    /// The memory of the queued answers, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        let each = self.0.iter().map(|answer| match answer {
            ExtProcAnswer::Message(_, body_bytes) => size_of::<ProcessingResponse>() + body_bytes,
            ExtProcAnswer::Body(body) => body.pieces.memory(),
        });
        each.sum()
    }

    /// Whether nothing is left to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Drops all answers.
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
            wire::body_answer(
                self.direction,
                piece.changed.then_some(piece.bytes),
                HeaderChanges::default(),
            )
        };
        Some((message, piece.last))
    }
}
