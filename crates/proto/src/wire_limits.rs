//! Counts the entries of a message on the wire, before it is decoded. An empty entry takes two
//! bytes on the wire and several hundred bytes in memory, so a limit on bytes alone would not limit
//! memory.
//!
//! Each type of entry has a limit per message. Together with the maximum size of a message, these
//! limits bound the memory of a message. A message of
//! [`MESSAGE_BYTES_MAX`](crate::MESSAGE_BYTES_MAX) takes up to 20 MB, and one of
//! [`PROXY_MESSAGE_BYTES_MAX`](crate::PROXY_MESSAGE_BYTES_MAX) up to 16 MB.

use scheduler::objects::{OBJECTS_MAX, TARGETS_MAX};
use scheduler::{ATTRIBUTES_MAX, ENDPOINTS_MAX, PLUGINS_MAX, PROFILES_MAX};

use crate::{InvalidState, state};

/// The maximum depth of nested messages, twice the depth that the deepest parameter needs.
const DEPTH_MAX: usize = 48;

/// The maximum number of endpoints of an update that is decoded. The limit exceeds the size of a
/// pool, because to refuse an update, the proxy must name the update's version, which is known only
/// after decoding.
const ENDPOINTS_DECODED_MAX: usize = 4 * ENDPOINTS_MAX;

/// The maximum number of labels of one endpoint, the same limit as in the crate `discovery`.
const LABELS_PER_ENDPOINT_MAX: usize = 64;

/// The maximum number of names of models, adapters or matches of one pool. A message with this many
/// names of 14 bytes has the maximum size.
const NAMES_MAX: usize = 1 << 18;

/// The maximum number of parameters and their values in one pipeline: 256 for each plugin.
const PARAMETERS_MAX: usize = 256 * PLUGINS_MAX;

/// The maximum number of pools that one proxy may request. No Envoy serves so many pools.
pub const POOLS_ASKED_MAX: usize = 256;

/// The maximum number of VMs in one report: twice the slots for VMs in a process.
pub const VMS_PER_REPORT_MAX: usize = 1_024;

/// The maximum number of rows of endpoints in one report: 32 VMs that know a full pool. A report of
/// maximum size has no room for so many rows.
const ENDPOINT_ROWS_MAX: usize = 32 * ENDPOINTS_MAX;

/// The maximum number of rows of models in one report. A filter writes at least 100 bytes for each
/// row, and at most 256 KiB of rows plus the rows of one VM.
const MODEL_ROWS_MAX: usize = 4_096;

/// The maximum number of rows of bands in one report. A filter writes at least 40 bytes for each
/// row.
const BAND_ROWS_MAX: usize = 8_192;

/// The maximum number of histograms in one report: those of all rows together.
const HISTOGRAMS_MAX: usize = 3 * MODEL_ROWS_MAX + BAND_ROWS_MAX + VMS_PER_REPORT_MAX;

/// The maximum number of statuses and drop reasons in one report: four for each row of
/// [`MODEL_ROWS_MAX`].
const COUNTS_MAX: usize = 4 * MODEL_ROWS_MAX;

/// The number of [`WireMessage`]s.
const TYPES: usize = 37;

/// The limits of a message type: the fields that are counted, and how often the type may occur in a
/// message.
#[derive(Clone, Copy, Debug)]
struct WireShape {
    of: WireMessage,
    name: &'static str,
    /// The maximum number of messages of this type in one message.
    messages_max: usize,
    /// The maximum number of values of repeated fields in all messages of this type together.
    values_max: usize,
    fields: &'static [WireField],
}

/// A field that is counted. Fields that are not counted have a fixed size, or take no more bytes in
/// memory than on the wire.
#[derive(Clone, Copy, Debug)]
struct WireField {
    number: u64,
    content: WireContent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WireContent {
    Message(WireMessage),
    /// The bytes of a message that is decoded separately. If the decoding of these bytes fails,
    /// only they are lost.
    Part(WireMessage),
    /// A repeated text.
    Texts,
    /// Repeated numbers of variable length.
    Varints,
}

/// The number of messages and values of one type that occurred in a message so far.
#[derive(Clone, Copy, Debug, Default)]
struct EntryCount {
    messages: usize,
    values: usize,
}

/// Counts the entries of one message.
#[derive(Debug)]
struct EntryCounter {
    counts: [EntryCount; TYPES],
}

/// A message whose entries are counted before it is decoded.
pub trait LimitedMessage: prost::Message + Default {
    const TYPE: WireMessage;

    /// Decodes the message after its entries were counted.
    ///
    /// # Errors
    /// Returns [`InvalidState::TooMany`], or the reason why the bytes are not a message.
    fn decode_limited(bytes: &[u8]) -> Result<Self, InvalidState> {
        check(Self::TYPE, bytes)?;
        Self::decode(bytes).map_err(InvalidState::Bytes)
    }
}

impl LimitedMessage for state::DaemonMessage {
    const TYPE: WireMessage = WireMessage::DaemonMessage;
}

impl LimitedMessage for state::ProxyMessage {
    const TYPE: WireMessage = WireMessage::ProxyMessage;
}

/// Defines [`WireMessage`] and [`SHAPES`] by one table. A row has the name of the type, the maximum
/// number of its messages and of its values, and the fields that are counted.
macro_rules! shapes {
    ($(
        $name:ident: $messages:expr, $values:expr,
        [$($kind:ident($number:literal $(, $of:ident)?)),*];
    )*) => {
        /// A type of message. The number of the type is its index in [`SHAPES`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum WireMessage {
            $($name,)*
        }

        static SHAPES: [WireShape; TYPES] = [$(WireShape {
            of: WireMessage::$name,
            name: stringify!($name),
            messages_max: $messages,
            values_max: $values,
            fields: &[$(WireField {
                number: $number,
                content: WireContent::$kind$((WireMessage::$of))?,
            }),*],
        },)*];
    };
}

shapes! {
    DaemonMessage: 1, 0, [
        Message(1, Welcome), Message(2, PoolUpdate), Message(3, Metrics), Message(4, PeerLoad),
        Message(40, LearnedModels)
    ];
    Welcome: 1, POOLS_ASKED_MAX, [Texts(3), Texts(4)];
    PoolUpdate: 1, 0, [
        Message(2, Version), Message(3, Endpoint), Message(7, Pipeline), Message(8, Objects),
        Message(65, ModelSet)
    ];
    Endpoint: ENDPOINTS_DECODED_MAX, 0, [Message(6, Label)];
    ModelSet: ENDPOINTS_MAX, NAMES_MAX, [Texts(1)];
    Label: LABELS_PER_ENDPOINT_MAX * ENDPOINTS_MAX, 0, [];
    Pipeline: 1, 0, [Message(1, Plugin), Message(2, Profile)];
    Profile: PROFILES_MAX, 0, [Message(4, ProfilePlugin)];
    ProfilePlugin: PROFILES_MAX * PLUGINS_MAX, 0, [];
    Plugin: PLUGINS_MAX, 0, [Message(4, Parameter)];
    Parameter: PARAMETERS_MAX, 0, [Message(5, ParameterList), Message(6, ParameterMap)];
    ParameterList: PARAMETERS_MAX, 0, [Message(1, Parameter)];
    ParameterMap: PARAMETERS_MAX, 0, [Message(1, Parameter)];
    Objects: 1, 0, [Message(1, Objective), Message(2, Model), Message(3, Rewrite)];
    Objective: OBJECTS_MAX, 0, [];
    Model: OBJECTS_MAX, 0, [Message(3, Target)];
    Rewrite: OBJECTS_MAX, OBJECTS_MAX * TARGETS_MAX, [Texts(1), Message(2, Target)];
    Target: 2 * OBJECTS_MAX * TARGETS_MAX, 0, [];
    Metrics: 1, 0, [
        Message(2, Version), Message(9, Lora), Message(10, Attribute), Message(11, MetricColumn)
    ];
    MetricColumn: 256, 0, [];
    Attribute: ATTRIBUTES_MAX, 0, [];
    Lora: ENDPOINTS_MAX, NAMES_MAX, [Texts(2), Texts(3), Texts(5)];
    PeerLoad: 1, 0, [];
    LearnedModels: 1, 0, [Message(2, Version)];
    Version: VMS_PER_REPORT_MAX, 0, [];
    ProxyMessage: 1, 0, [
        Message(1, Hello), Message(2, Ack), Message(3, Report), Message(4, LoadReport),
        Message(40, Observations), Message(41, LearnedModels)
    ];
    Hello: 1, POOLS_ASKED_MAX, [Texts(4)];
    Ack: 1, 0, [Message(2, Version), Message(4, Version)];
    Report: 1, 0, [Part(1, VmCounters)];
    VmCounters: VMS_PER_REPORT_MAX, 0, [
        Message(3, EndpointCounters), Message(4, ModelCounters), Message(5, Count),
        Message(6, Histogram), Message(9, Version), Message(15, BandCounters)
    ];
    BandCounters: BAND_ROWS_MAX, 16 * BAND_ROWS_MAX, [Varints(4), Message(5, Histogram)];
    EndpointCounters: ENDPOINT_ROWS_MAX, 0, [];
    ModelCounters: MODEL_ROWS_MAX, 16 * MODEL_ROWS_MAX, [
        Message(4, Count), Message(5, Histogram), Message(6, Histogram), Message(7, Histogram),
        Varints(15), Varints(16)
    ];
    Count: COUNTS_MAX, 0, [];
    Histogram: HISTOGRAMS_MAX, (crate::HISTOGRAM_BOUNDS.len() + 1) * HISTOGRAMS_MAX, [Varints(1)];
    LoadReport: 1, 0, [];
    Observations: 1, 0, [];
}

/// Counts the entries of a message of type `of`. Accepts bytes that are not a message only if
/// decoding them fails too.
///
/// # Errors
/// Returns [`InvalidState::TooMany`], or [`InvalidState::Malformed`].
pub fn check(of: WireMessage, bytes: &[u8]) -> Result<(), InvalidState> {
    let mut counter = EntryCounter {
        counts: [EntryCount::default(); TYPES],
    };
    counter.message(of, bytes, DEPTH_MAX)
}

// === impl EntryCounter ===

impl EntryCounter {
    fn message(
        &mut self,
        of: WireMessage,
        mut bytes: &[u8],
        depth_left: usize,
    ) -> Result<(), InvalidState> {
        let Some(shape) = SHAPES.get(of as usize) else {
            return Ok(());
        };
        let depth_left = depth_left.checked_sub(1).ok_or(InvalidState::TooMany {
            entries: "messages inside each other",
            max: DEPTH_MAX,
        })?;
        self.count(shape, shape.messages_max, |count| &mut count.messages, 1)?;
        while !bytes.is_empty() {
            let key = take_varint(&mut bytes)?;
            let content = shape
                .fields
                .iter()
                .find(|field| field.number == key >> 3)
                .map(|field| field.content);
            let content_bytes = match key & 7 {
                0 => {
                    take_varint(&mut bytes)?;
                    &[0]
                }
                1 => take(&mut bytes, 8)?,
                2 => {
                    let length = take_varint(&mut bytes)?;
                    take(&mut bytes, usize::try_from(length).unwrap_or(usize::MAX))?
                }
                5 => take(&mut bytes, 4)?,
                // The message is refused, because no writer of this protocol makes groups, and to
                // skip a group is not worth the code.
                3 => {
                    return Err(InvalidState::TooMany {
                        entries: "groups",
                        max: 0,
                    });
                }
                _ => return Err(InvalidState::Malformed),
            };
            let values = match content {
                Some(WireContent::Message(of)) if key & 7 == 2 => {
                    self.message(of, content_bytes, depth_left)?;
                    0
                }
                Some(WireContent::Part(of)) if key & 7 == 2 => {
                    match self.message(of, content_bytes, depth_left) {
                        Err(InvalidState::Malformed) => {}
                        counted => counted?,
                    }
                    0
                }
                Some(WireContent::Texts) => 1,
                Some(WireContent::Varints) => {
                    content_bytes.iter().filter(|byte| **byte < 0x80).count()
                }
                _ => 0,
            };
            self.count(shape, shape.values_max, |count| &mut count.values, values)?;
        }
        Ok(())
    }

    fn count(
        &mut self,
        shape: &WireShape,
        max: usize,
        which: impl FnOnce(&mut EntryCount) -> &mut usize,
        more: usize,
    ) -> Result<(), InvalidState> {
        let Some(count) = self.counts.get_mut(shape.of as usize).map(which) else {
            return Ok(());
        };
        *count = count.saturating_add(more);
        if *count > max {
            return Err(InvalidState::TooMany {
                entries: shape.name,
                max,
            });
        }
        Ok(())
    }
}

fn take<'b>(bytes: &mut &'b [u8], length: usize) -> Result<&'b [u8], InvalidState> {
    let (taken, rest) = bytes
        .split_at_checked(length)
        .ok_or(InvalidState::Malformed)?;
    *bytes = rest;
    Ok(taken)
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, InvalidState> {
    prost::encoding::decode_varint(bytes).map_err(|_| InvalidState::Malformed)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use prost::Message;
    use protox::prost_reflect::{DescriptorPool, FieldDescriptor, Kind};

    use super::WireMessage as M;
    use super::*;

    #[test]
    fn each_field_that_may_repeat_or_holds_a_message_is_counted() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let files = protox::compile(["state.proto"], [root]).unwrap();
        let descriptors = DescriptorPool::from_file_descriptor_set(files).unwrap();
        let expected = |field: &FieldDescriptor| match field.kind() {
            Kind::Message(of) => Some(format!("message {}", of.name())),
            Kind::String if field.is_list() => Some("texts".to_owned()),
            Kind::Bytes if field.is_list() => Some("part".to_owned()),
            Kind::Uint32 | Kind::Uint64 | Kind::Int32 | Kind::Sint32 if field.is_list() => {
                Some("varints".to_owned())
            }
            _ => None,
        };
        let mut types = 0;
        for (number, shape) in SHAPES.iter().enumerate() {
            assert_eq!(shape.of as usize, number, "{}", shape.name);
            let name = format!("switchpoint.state.v1.{}", shape.name);
            let message = descriptors.get_message_by_name(&name).unwrap();
            let counted = |field: &FieldDescriptor| {
                let number = u64::from(field.number());
                let found = shape.fields.iter().find(|field| field.number == number)?;
                Some(match found.content {
                    WireContent::Message(of) => format!("message {of:?}"),
                    WireContent::Part(_) => "part".to_owned(),
                    WireContent::Texts => "texts".to_owned(),
                    WireContent::Varints => "varints".to_owned(),
                })
            };
            for field in message.fields() {
                assert_eq!(counted(&field), expected(&field), "{}", field.full_name());
            }
            types += 1;
        }
        assert_eq!(types, descriptors.all_messages().count(), "all are counted");
    }

    /// Encodes a field with this content.
    fn field(number: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        prost::encoding::encode_varint(u64::from(number << 3 | 2), &mut bytes);
        prost::encoding::encode_varint(content.len() as u64, &mut bytes);
        bytes.extend(content);
        bytes
    }

    #[test]
    fn empty_entries_are_refused_before_they_take_memory() {
        // Each case has a path of fields, and the number of the field that repeats.
        let floods: [(WireMessage, &[u32], u32, &str); 12] = [
            (M::ProxyMessage, &[1], 4, "Hello"),
            (M::ProxyMessage, &[3], 1, "VmCounters"),
            (M::ProxyMessage, &[3, 1], 3, "EndpointCounters"),
            (M::ProxyMessage, &[3, 1], 4, "ModelCounters"),
            (M::ProxyMessage, &[3, 1], 5, "Count"),
            (M::ProxyMessage, &[3, 1, 4], 4, "Count"),
            (M::ProxyMessage, &[3, 1], 15, "BandCounters"),
            (M::DaemonMessage, &[2], 3, "Endpoint"),
            (M::DaemonMessage, &[2], 65, "ModelSet"),
            (M::DaemonMessage, &[2, 3], 6, "Label"),
            (M::DaemonMessage, &[2, 65], 1, "ModelSet"),
            (M::DaemonMessage, &[3], 9, "Lora"),
        ];
        for (root, path, repeated, entries) in floods {
            let flood = field(repeated, b"").repeat(300_000);
            let message = path
                .iter()
                .rev()
                .fold(flood, |content, number| field(*number, &content));
            let refused = check(root, &message).unwrap_err();
            assert!(
                matches!(refused, InvalidState::TooMany { entries: found, .. } if found == entries),
                "{entries}: {refused}"
            );
        }
        let counts = field(1, &[1; 600_000]);
        let histogram = field(3, &field(1, &field(6, &counts)));
        assert!(
            check(M::ProxyMessage, &histogram).is_err(),
            "packed numbers"
        );
        let parts = field(3, &field(1, &field(3, b"").repeat(20_000)).repeat(2));
        assert!(
            check(M::ProxyMessage, &parts).is_err(),
            "parts share the limits"
        );
    }

    #[test]
    fn what_the_limits_allow_takes_little_memory() {
        macro_rules! sizes {
            ($($of:ident)*) => { [$((M::$of, size_of::<state::$of>())),*] };
        }
        let sizes = sizes!(
            DaemonMessage Welcome PoolUpdate Endpoint ModelSet Label Pipeline Profile ProfilePlugin
            Plugin Parameter ParameterList ParameterMap Objects Objective Model Rewrite Target
            Metrics MetricColumn Attribute Lora PeerLoad LearnedModels Version ProxyMessage Hello
            Ack Report VmCounters BandCounters EndpointCounters ModelCounters Count Histogram
            LoadReport Observations
        );
        let bytes = |from: WireMessage, to: WireMessage| -> usize {
            sizes[from as usize..=to as usize]
                .iter()
                .map(|(of, size)| {
                    let shape = &SHAPES[*of as usize];
                    shape.messages_max * size + shape.values_max * size_of::<String>()
                })
                .sum()
        };
        let update = bytes(M::DaemonMessage, M::Target);
        let proxy = bytes(M::ProxyMessage, M::Observations);
        // The factor is 2, because a growing list doubles its capacity. Each size is checked alone,
        // because a pool update and metrics never come in one message.
        assert!(2 * update < 56 << 20, "{update}");
        assert!(2 * proxy < 56 << 20, "{proxy}");
        // An entry takes at least two bytes, so no message has room for the maximum number of all
        // types.
        let model = size_of::<state::ModelCounters>() * MODEL_ROWS_MAX;
        assert!(model < 2 << 20, "{model}");
    }

    #[test]
    fn a_part_that_is_no_message_does_not_spoil_the_others() {
        let report = field(3, &[field(1, &[0xff; 9]), field(1, b"\x0a\x01p")].concat());
        check(M::ProxyMessage, &report).unwrap();
        assert!(state::ProxyMessage::decode(&*report).is_ok());
        // A group could hide entries from the counter.
        let group = field(3, &field(1, &[0xf3, 0x07, 0xf4, 0x07]));
        assert!(check(M::ProxyMessage, &group).is_err());
    }

    #[test]
    fn messages_are_not_nested_without_end() {
        let deep = (0..DEPTH_MAX).fold(Vec::new(), |inner, at| {
            field(if at % 2 == 1 { 5 } else { 1 }, &inner)
        });
        assert!(check(M::Parameter, &deep).is_err());
    }
}
