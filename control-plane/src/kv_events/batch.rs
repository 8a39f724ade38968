//! The payload of a message: a batch of KV-cache events, as vLLM and SGLang write it.
//!
//! | | now | before |
//! |---|---|---|
//! | batch | array `[time, events, rank]`; also read: a map | the same |
//! | event | map with `type`, `block_hashes`, ... | array that begins with the type |
//!
//! Only counts are read: how many blocks are stored and removed, where, and whether the cache was
//! cleared. Hashes and token ids are skipped. So a batch takes no memory beyond its bytes, and the
//! limit of a message (`MESSAGE_BYTES_MAX`) is the limit of events, hashes and nesting too.

use super::msgpack::{InvalidMsgpack, MsgpackReader, MsgpackToken};

/// Where an engine keeps blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheMedium {
    Gpu,
    Cpu,
    /// Storage behind the CPU's memory.
    Storage,
}

/// The blocks of one medium that a batch changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChangedBlocks {
    pub stored: u64,
    pub removed: u64,
}

/// The counts of a batch of events.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchSummary {
    /// When the engine made the batch, in Unix seconds.
    pub time: f64,
    /// The data-parallel rank of the engine.
    pub rank: Option<u64>,
    /// Whether the cache was cleared. Then [`Self::blocks`] has only what came after that.
    pub is_cleared: bool,
    /// The changed blocks, by medium.
    pub blocks: [ChangedBlocks; CacheMedium::COUNT],
    /// The tokens in a block, if the batch stored any.
    pub block_tokens: Option<u64>,
    /// The number of events of another type.
    pub unknown_events: u64,
}

/// The reason why a payload is not a batch of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBatch {
    #[error("not MessagePack: {0}")]
    Msgpack(#[from] InvalidMsgpack),
    #[error("{0} has another type than expected")]
    Type(&'static str),
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("bytes follow the batch")]
    TrailingBytes,
}

/// The fields of a batch that are read.
enum BatchField {
    Time,
    Events,
    Rank,
    Other,
}

/// The fields of an event that are read.
enum EventField {
    Kind,
    Hashes,
    BlockTokens,
    Medium,
    Other,
}

/// An event, as far as it has been read.
#[derive(Default)]
struct CacheEvent<'a> {
    kind: Option<&'a [u8]>,
    hashes: Option<u32>,
    block_tokens: Option<u64>,
    medium: Option<&'a [u8]>,
}

const STORED: &[u8] = b"BlockStored";
const REMOVED: &[u8] = b"BlockRemoved";
const CLEARED: &[u8] = b"AllBlocksCleared";

// === impl CacheMedium ===

impl CacheMedium {
    pub const COUNT: usize = 3;

    /// The names of all media, in the order of [`BatchSummary::blocks`].
    pub const NAMES: [&'static str; Self::COUNT] = ["gpu", "cpu", "storage"];

    /// Returns the medium that an engine names. vLLM writes `GPU` and `CPU`, and older engines
    /// nothing; SGLang also writes `CPU_PINNED`, `DISK` and `EXTERNAL`.
    #[must_use]
    pub fn from_name(name: Option<&[u8]>) -> Self {
        let begins = |name: &[u8], with: &[u8]| {
            name.get(..with.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(with))
        };
        match name {
            None => Self::Gpu,
            Some(name) if begins(name, b"gpu") => Self::Gpu,
            Some(name) if begins(name, b"cpu") => Self::Cpu,
            Some(_) => Self::Storage,
        }
    }
}

// === impl BatchSummary ===

impl BatchSummary {
    /// Reads the payload of a message.
    ///
    /// # Errors
    /// Returns [`InvalidBatch`] if the payload is no batch. A batch is read as a whole or not at
    /// all.
    pub fn decode(payload: &[u8]) -> Result<Self, InvalidBatch> {
        let mut reader = MsgpackReader::new(payload);
        let mut batch = Self::default();
        let mut has_events = false;
        match reader.token()? {
            MsgpackToken::Array(fields) => {
                for position in 0..fields {
                    let field = BatchField::at(position);
                    has_events |= matches!(field, BatchField::Events);
                    batch.read_field(&field, &mut reader)?;
                }
            }
            MsgpackToken::Map(pairs) => {
                for _ in 0..pairs {
                    let field = BatchField::from_name(text(&mut reader, "a name")?);
                    has_events |= matches!(field, BatchField::Events);
                    batch.read_field(&field, &mut reader)?;
                }
            }
            _ => return Err(InvalidBatch::Type("the batch")),
        }
        if !reader.is_at_end() {
            return Err(InvalidBatch::TrailingBytes);
        }
        if !has_events {
            return Err(InvalidBatch::Missing("the list of events"));
        }
        Ok(batch)
    }

    fn read_field(
        &mut self,
        field: &BatchField,
        reader: &mut MsgpackReader<'_>,
    ) -> Result<(), InvalidBatch> {
        match field {
            BatchField::Time => self.time = seconds(reader)?,
            BatchField::Rank => self.rank = number(reader, "the rank")?,
            BatchField::Other => reader.skip(1)?,
            BatchField::Events => {
                let MsgpackToken::Array(events) = reader.token()? else {
                    return Err(InvalidBatch::Type("the list of events"));
                };
                for _ in 0..events {
                    let event = CacheEvent::read(reader)?;
                    self.add(&event)?;
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, event: &CacheEvent<'_>) -> Result<(), InvalidBatch> {
        let kind = event.kind.ok_or(InvalidBatch::Missing("an event's type"))?;
        let medium = CacheMedium::from_name(event.medium);
        let blocks = &mut self.blocks[medium as usize];
        let hashes = event
            .hashes
            .map(u64::from)
            .ok_or(InvalidBatch::Missing("an event's block_hashes"));
        match kind {
            STORED => {
                blocks.stored += hashes?;
                self.block_tokens = event.block_tokens.or(self.block_tokens);
            }
            REMOVED => blocks.removed += hashes?,
            // Some engines also clear one medium, which leaves the others.
            CLEARED if medium == CacheMedium::Gpu => {
                self.is_cleared = true;
                self.blocks = Default::default();
            }
            _ => self.unknown_events += 1,
        }
        Ok(())
    }
}

// === impl BatchField ===

impl BatchField {
    fn at(position: u32) -> Self {
        match position {
            0 => Self::Time,
            1 => Self::Events,
            2 => Self::Rank,
            _ => Self::Other,
        }
    }

    fn from_name(name: Option<&[u8]>) -> Self {
        match name {
            Some(b"ts") => Self::Time,
            Some(b"events") => Self::Events,
            Some(b"data_parallel_rank" | b"attn_dp_rank") => Self::Rank,
            _ => Self::Other,
        }
    }
}

// === impl EventField ===

impl EventField {
    /// Returns the field at a position of an event that is an array.
    fn at(position: u32, kind: Option<&[u8]>) -> Self {
        match (position, kind) {
            (0, _) => Self::Kind,
            (1, Some(STORED | REMOVED)) => Self::Hashes,
            (4, Some(STORED)) => Self::BlockTokens,
            (6, Some(STORED)) | (2, Some(REMOVED)) | (1, Some(CLEARED)) => Self::Medium,
            _ => Self::Other,
        }
    }

    fn from_name(name: Option<&[u8]>) -> Self {
        match name {
            Some(b"type") => Self::Kind,
            Some(b"block_hashes") => Self::Hashes,
            Some(b"block_size") => Self::BlockTokens,
            Some(b"medium") => Self::Medium,
            _ => Self::Other,
        }
    }
}

// === impl CacheEvent ===

impl<'a> CacheEvent<'a> {
    fn read(reader: &mut MsgpackReader<'a>) -> Result<Self, InvalidBatch> {
        let mut event = Self::default();
        match reader.token()? {
            MsgpackToken::Array(fields) => {
                for position in 0..fields {
                    let field = EventField::at(position, event.kind);
                    event.read_field(&field, reader)?;
                }
            }
            MsgpackToken::Map(pairs) => {
                for _ in 0..pairs {
                    let field = EventField::from_name(text(reader, "a name")?);
                    event.read_field(&field, reader)?;
                }
            }
            _ => return Err(InvalidBatch::Type("an event")),
        }
        Ok(event)
    }

    fn read_field(
        &mut self,
        field: &EventField,
        reader: &mut MsgpackReader<'a>,
    ) -> Result<(), InvalidBatch> {
        match field {
            EventField::Kind => self.kind = text(reader, "an event's type")?,
            EventField::BlockTokens => self.block_tokens = number(reader, "block_size")?,
            EventField::Medium => self.medium = text(reader, "medium")?,
            EventField::Other => reader.skip(1)?,
            EventField::Hashes => {
                let MsgpackToken::Array(hashes) = reader.token()? else {
                    return Err(InvalidBatch::Type("block_hashes"));
                };
                reader.skip(hashes.into())?;
                self.hashes = Some(hashes);
            }
        }
        Ok(())
    }
}

fn text<'a>(
    reader: &mut MsgpackReader<'a>,
    what: &'static str,
) -> Result<Option<&'a [u8]>, InvalidBatch> {
    match reader.token()? {
        MsgpackToken::Text(text) => Ok(Some(text)),
        MsgpackToken::Nil => Ok(None),
        _ => Err(InvalidBatch::Type(what)),
    }
}

fn number(reader: &mut MsgpackReader<'_>, what: &'static str) -> Result<Option<u64>, InvalidBatch> {
    match reader.token()? {
        MsgpackToken::Unsigned(number) => Ok(Some(number)),
        MsgpackToken::Nil => Ok(None),
        _ => Err(InvalidBatch::Type(what)),
    }
}

fn seconds(reader: &mut MsgpackReader<'_>) -> Result<f64, InvalidBatch> {
    match reader.token()? {
        MsgpackToken::Float(seconds) => Ok(seconds),
        #[expect(
            clippy::cast_precision_loss,
            reason = "a time in whole seconds is far below 2^53"
        )]
        MsgpackToken::Unsigned(seconds) => Ok(seconds as f64),
        _ => Err(InvalidBatch::Type("the time")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// MessagePack by hand: texts and arrays below 16 values, and numbers below 128.
    fn string(text: &str) -> Vec<u8> {
        let mut bytes = vec![0xd9, u8::try_from(text.len()).unwrap()];
        bytes.extend(text.as_bytes());
        bytes
    }

    fn array(values: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0x90 | u8::try_from(values.len()).unwrap()];
        bytes.extend(values.concat());
        bytes
    }

    fn map(pairs: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut bytes = vec![0x80 | u8::try_from(pairs.len()).unwrap()];
        for (name, value) in pairs {
            bytes.extend(string(name));
            bytes.extend(value);
        }
        bytes
    }

    fn hashes(count: u64) -> Vec<u8> {
        let hash = |n: u64| [&[0xcf][..], &(u64::MAX - n).to_be_bytes()].concat();
        array(&(0..count).map(hash).collect::<Vec<_>>())
    }

    /// A hash of SHA-256 in bytes, as vLLM writes it with `--prefix-caching-hash-algo sha256`.
    fn byte_hashes(count: usize) -> Vec<u8> {
        let hash = [&[0xc4, 32][..], &[7; 32]].concat();
        array(&vec![hash; count])
    }

    fn time() -> Vec<u8> {
        [&[0xcb][..], &1_750_000_000.5_f64.to_be_bytes()].concat()
    }

    /// Token ids of each size.
    fn tokens() -> Vec<u8> {
        array(&[
            vec![5],
            vec![0xcd, 1, 2],
            vec![0xce, 0, 1, 2, 3],
            vec![0xc0],
        ])
    }

    const NIL: u8 = 0xc0;

    /// The events of vLLM 0.32, as received.
    fn maps() -> Vec<u8> {
        let stored = map(&[
            ("type", string("BlockStored")),
            ("block_hashes", hashes(3)),
            ("parent_block_hash", vec![NIL]),
            ("token_ids", tokens()),
            ("block_size", vec![32]),
            ("lora_id", vec![NIL]),
            ("lora_name", vec![NIL]),
            ("medium", string("GPU")),
            (
                "extra_keys",
                array(&[vec![NIL], array(&[string("salt")]), vec![NIL]]),
            ),
            ("group_idx", vec![0]),
            ("kv_cache_spec_kind", string("full_attention")),
        ]);
        let removed = map(&[
            ("type", string("BlockRemoved")),
            ("block_hashes", hashes(1)),
            ("medium", string("GPU")),
            ("group_idx", vec![0]),
        ]);
        let offloaded = map(&[
            ("medium", string("CPU")),
            ("block_hashes", byte_hashes(2)),
            ("block_size", vec![32]),
            ("type", string("BlockStored")),
        ]);
        array(&[time(), array(&[stored, removed, offloaded]), vec![1]])
    }

    /// The same as arrays, as older engines write them.
    fn arrays() -> Vec<u8> {
        let stored = array(&[
            string("BlockStored"),
            hashes(3),
            vec![NIL],
            tokens(),
            vec![32],
            vec![NIL],
            string("GPU"),
            vec![NIL],
        ]);
        let removed = array(&[string("BlockRemoved"), hashes(1)]);
        let offloaded = array(&[
            string("BlockStored"),
            byte_hashes(2),
            vec![NIL],
            tokens(),
            vec![32],
            vec![NIL],
            string("CPU_PINNED"),
        ]);
        array(&[time(), array(&[stored, removed, offloaded]), vec![1]])
    }

    fn changed(stored: u64, removed: u64) -> ChangedBlocks {
        ChangedBlocks { stored, removed }
    }

    fn expected() -> BatchSummary {
        BatchSummary {
            time: 1_750_000_000.5,
            rank: Some(1),
            blocks: [changed(3, 1), changed(2, 0), changed(0, 0)],
            block_tokens: Some(32),
            ..BatchSummary::default()
        }
    }

    #[test]
    fn events_are_read_as_maps_and_as_arrays() {
        assert_eq!(BatchSummary::decode(&maps()), Ok(expected()));
        assert_eq!(BatchSummary::decode(&arrays()), Ok(expected()));
    }

    #[test]
    fn a_batch_may_be_a_map_and_have_no_rank() {
        let cleared = map(&[("type", string("AllBlocksCleared"))]);
        let batch = map(&[
            ("events", array(&[cleared])),
            ("ts", vec![7]),
            ("later_field", array(&[vec![1], vec![2]])),
        ]);
        let read = BatchSummary::decode(&batch).unwrap();
        assert!(read.is_cleared && read.rank.is_none());
        assert_eq!(read.time.to_string(), "7");
        let short = array(&[time(), array(&[array(&[string("AllBlocksCleared")])])]);
        assert!(BatchSummary::decode(&short).unwrap().is_cleared);
    }

    #[test]
    fn blocks_stored_before_a_clear_do_not_count() {
        let stored = |count| array(&[string("BlockStored"), hashes(count)]);
        let cleared = array(&[string("AllBlocksCleared")]);
        let batch = array(&[time(), array(&[stored(5), cleared, stored(2)])]);
        let read = BatchSummary::decode(&batch).unwrap();
        assert!(read.is_cleared);
        assert_eq!(read.blocks[0], changed(2, 0));
    }

    #[test]
    fn a_clear_of_another_medium_leaves_the_gpu() {
        let cleared = |medium| {
            let event = map(&[
                ("type", string("AllBlocksCleared")),
                ("medium", string(medium)),
            ]);
            let batch = array(&[time(), array(&[event])]);
            let read = BatchSummary::decode(&batch).unwrap();
            (read.is_cleared, read.unknown_events)
        };
        assert_eq!(cleared("CPU"), (false, 1));
        assert_eq!(cleared("GPU"), (true, 0));
        let array_form = array(&[string("AllBlocksCleared"), string("DISK")]);
        let batch = array(&[time(), array(&[array_form])]);
        assert!(!BatchSummary::decode(&batch).unwrap().is_cleared);
    }

    #[test]
    fn an_unknown_event_is_counted_and_skipped() {
        let later = map(&[("type", string("BlockMoved")), ("block_hashes", hashes(2))]);
        let array_form = array(&[string("BlockMoved"), tokens()]);
        let batch = array(&[time(), array(&[later, array_form])]);
        let read = BatchSummary::decode(&batch).unwrap();
        assert_eq!(read.unknown_events, 2);
        assert_eq!(read.blocks, <[ChangedBlocks; 3]>::default());
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let event = |event: Vec<u8>| array(&[time(), array(&[event])]);
        let cases = [
            (vec![], "not MessagePack: it ends within a value"),
            (vec![0x05], "the batch has another type than expected"),
            (array(&[time()]), "the list of events is missing"),
            (
                array(&[time(), vec![3]]),
                "the list of events has another type than expected",
            ),
            (
                array(&[string("now"), array(&[])]),
                "the time has another type than expected",
            ),
            (event(vec![3]), "an event has another type than expected"),
            (event(map(&[])), "an event's type is missing"),
            (
                event(array(&[string("BlockStored")])),
                "an event's block_hashes is missing",
            ),
            (
                event(array(&[string("BlockRemoved"), vec![3]])),
                "block_hashes has another type than expected",
            ),
            ([arrays(), vec![0]].concat(), "bytes follow the batch"),
            (
                vec![0x91, 0xc1],
                "not MessagePack: it has the reserved marker 0xc1",
            ),
        ];
        for (bytes, why) in cases {
            let refused = BatchSummary::decode(&bytes).unwrap_err();
            assert_eq!(refused.to_string(), why);
        }
    }

    #[test]
    fn a_batch_that_is_cut_anywhere_is_refused() {
        for batch in [maps(), arrays()] {
            for end in 0..batch.len() {
                assert!(BatchSummary::decode(&batch[..end]).is_err(), "{end}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = BatchSummary::decode(&bytes);
        }

        #[test]
        fn a_batch_with_changed_bytes_never_counts_more_blocks_than_it_has_bytes(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            of_maps: bool,
        ) {
            let mut batch = if of_maps { maps() } else { arrays() };
            for (place, byte) in changes {
                let place = place.index(batch.len());
                batch[place] = byte;
            }
            if let Ok(read) = BatchSummary::decode(&batch) {
                let blocks: u64 = read.blocks.iter().map(|b| b.stored + b.removed).sum();
                prop_assert!(blocks <= batch.len() as u64);
            }
        }
    }
}
