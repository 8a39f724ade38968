//! Holds request bodies, and sends the bodies of requests and responses in the form of the proxy's
//! mode.

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use exchange::BodyProgress;
use exchange::rewrite::BodyEdit;

use super::{ExtProcHost, PIECE_BYTES_MAX, RequestEndedBy};
use crate::answers::AnswerBody;
use crate::held_body::BodyPieces;
use crate::wire::{self, BodyDirection, BodyMode, HeaderChanges};

// === impl ExtProcHost ===

impl ExtProcHost {
    /// Holds a piece of the request body. Returns the length of the body so far.
    pub(in crate::ext_proc_stream) fn hold(
        &mut self,
        piece: Vec<u8>,
        progress: BodyProgress,
    ) -> usize {
        self.held.push(piece);
        if progress != BodyProgress::Partial {
            self.end = RequestEndedBy::Body;
        }
        self.held.len()
    }

    /// Records that the request ends with trailers.
    pub(in crate::ext_proc_stream) fn end_with_trailers(&mut self) {
        self.end = RequestEndedBy::Trailers;
    }

    /// The answer to a body that came as one piece, and the length of the body in it.
    pub(super) fn buffered_answer(
        &mut self,
        edit: Option<BodyEdit>,
        changes: HeaderChanges,
    ) -> (ProcessingResponse, usize) {
        // Trailers came instead of a body. Their answer cannot change headers, so the destination
        // goes as metadata only.
        let Some(piece) = self.held.take(edit) else {
            return (wire::trailers_answer(BodyDirection::Request), 0);
        };
        let replacement = piece.changed.then_some(piece.bytes);
        let body_bytes = replacement.as_ref().map_or(0, Vec::len);
        (
            wire::body_answer(BodyDirection::Request, replacement, changes),
            body_bytes,
        )
    }

    pub(super) fn send_pieces(&mut self, edit: Option<BodyEdit>) {
        let duplex = self.modes().request == BodyMode::FullDuplex;
        // Without full duplex, each piece gets its own answer and keeps its length.
        let pieces = self
            .held
            .take_pieces(edit, if duplex { PIECE_BYTES_MAX } else { usize::MAX });
        self.out.push_body(AnswerBody {
            pieces,
            direction: BodyDirection::Request,
            duplex,
            ends: self.end == RequestEndedBy::Body,
        });
        if self.end == RequestEndedBy::Trailers {
            self.answer(wire::trailers_answer(BodyDirection::Request));
        }
    }

    /// Forwards a piece of a body unread.
    pub(in crate::ext_proc_stream) fn forward_body(
        &mut self,
        direction: BodyDirection,
        body: Vec<u8>,
        end_of_stream: bool,
    ) {
        let modes = self.modes();
        let mode = if direction == BodyDirection::Request {
            modes.request
        } else {
            modes.response
        };
        if mode == BodyMode::FullDuplex {
            self.send_duplex(direction, body, end_of_stream);
        } else {
            self.answer(wire::body_answer(direction, None, HeaderChanges::default()));
        }
    }

    pub(super) fn send_duplex(&mut self, direction: BodyDirection, body: Vec<u8>, ends: bool) {
        if body.len() > PIECE_BYTES_MAX {
            let pieces = BodyPieces::from_bytes(body, PIECE_BYTES_MAX);
            self.out.push_body(AnswerBody {
                pieces,
                direction,
                duplex: true,
                ends,
            });
        } else {
            let body_bytes = body.len();
            self.out
                .push(wire::streamed_body(direction, body, ends), body_bytes);
        }
    }
}
