//! Reads MessagePack from a slice, one value after another. Values that are not needed are skipped
//! without being decoded, and nothing is allocated.

use rmp::Marker;

/// The reason why bytes are not MessagePack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidMsgpack {
    #[error("it ends within a value")]
    Truncated,
    #[error("it has the reserved marker 0xc1")]
    Reserved,
}

/// A value, or the beginning of one that consists of further values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MsgpackToken<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Negative(i64),
    Float(f64),
    /// The bytes of a text, which may not be UTF-8.
    Text(&'a [u8]),
    /// The bytes of a binary value or of an extension.
    Bytes(&'a [u8]),
    /// An array of this many values, which follow.
    Array(u32),
    /// A map of this many pairs of values, which follow.
    Map(u32),
}

/// Reads the values of a slice.
#[derive(Clone, Debug)]
pub struct MsgpackReader<'a> {
    rest: &'a [u8],
}

/// The size of a value by its first byte, for values of a fixed size; 0 for all others. Token ids
/// are most of a message, and with this table they are skipped without a decision for each type.
const FIXED_SIZES: [u8; 256] = fixed_sizes();

const fn fixed_sizes() -> [u8; 256] {
    let mut sizes = [0; 256];
    let mut first = 0;
    while first < sizes.len() {
        sizes[first] = match first {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 => 3,
            0xca | 0xce | 0xd2 => 5,
            0xcb | 0xcf | 0xd3 => 9,
            _ => 0,
        };
        first += 1;
    }
    sizes
}

// === impl MsgpackReader ===

impl<'a> MsgpackReader<'a> {
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[must_use]
    pub fn is_at_end(&self) -> bool {
        self.rest.is_empty()
    }

    /// Reads the next value, or the beginning of the next array or map. Each value takes at least a
    /// byte, so an array or map that announces more values than there are bytes is refused here.
    ///
    /// # Errors
    /// Returns [`InvalidMsgpack`] if there is no such value.
    pub fn token(&mut self) -> Result<MsgpackToken<'a>, InvalidMsgpack> {
        let &[first] = self.take(1)? else {
            return Err(InvalidMsgpack::Truncated);
        };
        Ok(match Marker::from_u8(first) {
            Marker::Null => MsgpackToken::Nil,
            Marker::False => MsgpackToken::Bool(false),
            Marker::True => MsgpackToken::Bool(true),
            Marker::FixPos(number) => MsgpackToken::Unsigned(number.into()),
            Marker::FixNeg(number) => MsgpackToken::Negative(number.into()),
            Marker::U8 => MsgpackToken::Unsigned(self.unsigned(1)?),
            Marker::U16 => MsgpackToken::Unsigned(self.unsigned(2)?),
            Marker::U32 => MsgpackToken::Unsigned(self.unsigned(4)?),
            Marker::U64 => MsgpackToken::Unsigned(self.unsigned(8)?),
            Marker::I8 => self.signed(1)?,
            Marker::I16 => self.signed(2)?,
            Marker::I32 => self.signed(4)?,
            Marker::I64 => self.signed(8)?,
            Marker::F32 => MsgpackToken::Float(f32::from_be_bytes(self.array()?).into()),
            Marker::F64 => MsgpackToken::Float(f64::from_be_bytes(self.array()?)),
            Marker::FixStr(length) => MsgpackToken::Text(self.take(length.into())?),
            Marker::Str8 => MsgpackToken::Text(self.sized(1)?),
            Marker::Str16 => MsgpackToken::Text(self.sized(2)?),
            Marker::Str32 => MsgpackToken::Text(self.sized(4)?),
            Marker::Bin8 => MsgpackToken::Bytes(self.sized(1)?),
            Marker::Bin16 => MsgpackToken::Bytes(self.sized(2)?),
            Marker::Bin32 => MsgpackToken::Bytes(self.sized(4)?),
            Marker::FixExt1 => self.extension(1)?,
            Marker::FixExt2 => self.extension(2)?,
            Marker::FixExt4 => self.extension(4)?,
            Marker::FixExt8 => self.extension(8)?,
            Marker::FixExt16 => self.extension(16)?,
            Marker::Ext8 => self.sized_extension(1)?,
            Marker::Ext16 => self.sized_extension(2)?,
            Marker::Ext32 => self.sized_extension(4)?,
            Marker::FixArray(length) => MsgpackToken::Array(self.announced(length.into(), 1)?),
            Marker::Array16 => MsgpackToken::Array(self.announced_by(2, 1)?),
            Marker::Array32 => MsgpackToken::Array(self.announced_by(4, 1)?),
            Marker::FixMap(length) => MsgpackToken::Map(self.announced(length.into(), 2)?),
            Marker::Map16 => MsgpackToken::Map(self.announced_by(2, 2)?),
            Marker::Map32 => MsgpackToken::Map(self.announced_by(4, 2)?),
            Marker::Reserved => return Err(InvalidMsgpack::Reserved),
        })
    }

    /// Skips this many values, with all values inside of them. The depth of nesting does not
    /// matter, because nothing is kept for a level.
    ///
    /// # Errors
    /// Returns [`InvalidMsgpack`] if there are not so many values.
    pub fn skip(&mut self, mut values: u64) -> Result<(), InvalidMsgpack> {
        while values > 0 {
            values -= 1;
            let &first = self.rest.first().ok_or(InvalidMsgpack::Truncated)?;
            let size = FIXED_SIZES[usize::from(first)];
            if size > 0 {
                self.take(size.into())?;
                continue;
            }
            // Neither sum overflows: an announced length is below the number of bytes.
            match self.token()? {
                MsgpackToken::Array(length) => values += u64::from(length),
                MsgpackToken::Map(pairs) => values += 2 * u64::from(pairs),
                _ => {}
            }
        }
        Ok(())
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], InvalidMsgpack> {
        let (taken, rest) = self
            .rest
            .split_at_checked(bytes)
            .ok_or(InvalidMsgpack::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], InvalidMsgpack> {
        let bytes = self.take(N)?;
        bytes.try_into().map_err(|_| InvalidMsgpack::Truncated)
    }

    fn unsigned(&mut self, bytes: usize) -> Result<u64, InvalidMsgpack> {
        let taken = self.take(bytes)?.iter();
        Ok(taken.fold(0, |number, &byte| (number << 8) | u64::from(byte)))
    }

    fn signed(&mut self, bytes: usize) -> Result<MsgpackToken<'a>, InvalidMsgpack> {
        let unused = 64 - 8 * bytes;
        let number = (self.unsigned(bytes)? << unused).cast_signed() >> unused;
        Ok(u64::try_from(number).map_or(MsgpackToken::Negative(number), MsgpackToken::Unsigned))
    }

    /// Reads a length of this many bytes.
    fn length(&mut self, bytes: usize) -> Result<usize, InvalidMsgpack> {
        usize::try_from(self.unsigned(bytes)?).map_err(|_| InvalidMsgpack::Truncated)
    }

    fn sized(&mut self, bytes: usize) -> Result<&'a [u8], InvalidMsgpack> {
        let length = self.length(bytes)?;
        self.take(length)
    }

    fn extension(&mut self, length: usize) -> Result<MsgpackToken<'a>, InvalidMsgpack> {
        self.take(1)?; // its type
        Ok(MsgpackToken::Bytes(self.take(length)?))
    }

    fn sized_extension(&mut self, bytes: usize) -> Result<MsgpackToken<'a>, InvalidMsgpack> {
        let length = self.length(bytes)?;
        self.extension(length)
    }

    fn announced(&self, length: usize, values_each: usize) -> Result<u32, InvalidMsgpack> {
        let fits = length
            .checked_mul(values_each)
            .is_some_and(|values| values <= self.rest.len());
        u32::try_from(length)
            .ok()
            .filter(|_| fits)
            .ok_or(InvalidMsgpack::Truncated)
    }

    fn announced_by(&mut self, bytes: usize, values_each: usize) -> Result<u32, InvalidMsgpack> {
        let length = self.length(bytes)?;
        self.announced(length, values_each)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn token(bytes: &[u8]) -> Result<MsgpackToken<'_>, InvalidMsgpack> {
        MsgpackReader::new(bytes).token()
    }

    #[test]
    fn each_type_of_the_format_is_read() {
        use MsgpackToken::{Array, Bool, Bytes, Float, Map, Negative, Nil, Text, Unsigned};
        let cases: &[(&[u8], MsgpackToken<'_>)] = &[
            (&[0xc0], Nil),
            (&[0xc3], Bool(true)),
            (&[0x7f], Unsigned(127)),
            (&[0xff], Negative(-1)),
            (&[0xcd, 1, 2], Unsigned(258)),
            (
                &[0xcf, 255, 0, 0, 0, 0, 0, 0, 1],
                Unsigned(0xff00_0000_0000_0001),
            ),
            (&[0xd0, 0x80], Negative(-128)),
            (&[0xd1, 0, 5], Unsigned(5)),
            (
                &[0xd3, 255, 255, 255, 255, 255, 255, 255, 254],
                Negative(-2),
            ),
            (&[0xca, 0x3f, 0x80, 0, 0], Float(1.0)),
            (&[0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0], Float(1.0)),
            (&[0xa2, b'a', b'b'], Text(b"ab")),
            (&[0xd9, 1, b'a'], Text(b"a")),
            (&[0xc4, 2, 7, 8], Bytes(&[7, 8])),
            (&[0xd5, 9, 7, 8], Bytes(&[7, 8])),
            (&[0xc7, 1, 9, 7], Bytes(&[7])),
            (&[0x91, 0], Array(1)),
            (&[0xdc, 0, 1, 0], Array(1)),
            (&[0x81, 0, 0], Map(1)),
            (&[0xde, 0, 1, 0, 0], Map(1)),
        ];
        for (bytes, expected) in cases {
            assert_eq!(token(bytes), Ok(*expected), "{bytes:x?}");
            let mut reader = MsgpackReader::new(bytes);
            reader.skip(1).unwrap();
            assert!(reader.is_at_end(), "{bytes:x?} is skipped as a whole");
        }
        assert_eq!(token(&[0xc1]), Err(InvalidMsgpack::Reserved));
    }

    #[test]
    fn more_values_than_bytes_are_refused_at_once() {
        for bytes in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
            &[0xdf, 0, 0, 0, 1, 0],
            &[0x92, 0],
            &[0xdb, 0xff, 0xff, 0xff, 0xff],
            &[],
        ] {
            assert_eq!(token(bytes), Err(InvalidMsgpack::Truncated), "{bytes:x?}");
        }
    }

    #[test]
    fn a_deep_value_is_skipped() {
        let mut deep = vec![0x91; 1 << 20];
        deep.push(0xc0);
        let mut reader = MsgpackReader::new(&deep);
        assert_eq!(reader.skip(1), Ok(()));
        assert!(reader.is_at_end());
    }

    proptest! {
        #[test]
        fn any_bytes_are_skipped_or_refused(bytes: Vec<u8>) {
            let mut reader = MsgpackReader::new(&bytes);
            while reader.skip(1).is_ok() {}
            let mut reader = MsgpackReader::new(&bytes);
            while reader.token().is_ok() {}
        }
    }
}
