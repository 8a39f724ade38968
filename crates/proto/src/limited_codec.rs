//! The codec of the state stream. This codec works like prost's codec, but counts the entries of a
//! message before it decodes the message.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::Buf;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

use crate::wire_limits::LimitedMessage;

/// A codec that sends messages of type `T` and receives messages of type `U`.
#[derive(Debug)]
pub struct LimitedCodec<T, U>(PhantomData<(T, U)>);

#[derive(Debug)]
pub struct LimitedDecoder<U>(PhantomData<U>);

// === impl LimitedCodec ===

impl<T, U> Default for LimitedCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + 'static, U: LimitedMessage + 'static> Codec for LimitedCodec<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = LimitedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        LimitedDecoder(PhantomData)
    }
}

// === impl LimitedDecoder ===

impl<U: LimitedMessage> Decoder for LimitedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // The buffer is contiguous, so this call copies nothing.
        let bytes = buffer.copy_to_bytes(buffer.remaining());
        U::decode_limited(&bytes)
            .map(Some)
            .map_err(|why| Status::invalid_argument(why.to_string()))
    }
}
