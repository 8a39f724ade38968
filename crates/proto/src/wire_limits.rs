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

/// A type of message. The number of the type is its index in [`SHAPES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireMessage {
    DaemonMessage,
    Welcome,
    PoolUpdate,
    Endpoint,
    ModelSet,
    Label,
    Pipeline,
    Profile,
    ProfilePlugin,
    Plugin,
    Parameter,
    ParameterList,
    ParameterMap,
    Objects,
    Objective,
    Model,
    Rewrite,
    Target,
    Metrics,
    MetricColumn,
    Attribute,
    Lora,
    PeerLoad,
    LearnedModels,
    Version,
    ProxyMessage,
    Hello,
    Ack,
    Report,
    VmCounters,
    BandCounters,
    EndpointCounters,
    ModelCounters,
    Count,
    Histogram,
    LoadReport,
    Observations,
}

use WireMessage as M;

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
    const TYPE: WireMessage = M::DaemonMessage;
}

impl LimitedMessage for state::ProxyMessage {
    const TYPE: WireMessage = M::ProxyMessage;
}

const fn message(number: u64, of: WireMessage) -> WireField {
    WireField {
        number,
        content: WireContent::Message(of),
    }
}

const fn part(number: u64, of: WireMessage) -> WireField {
    WireField {
        number,
        content: WireContent::Part(of),
    }
}

const fn texts(number: u64) -> WireField {
    WireField {
        number,
        content: WireContent::Texts,
    }
}

const fn varints(number: u64) -> WireField {
    WireField {
        number,
        content: WireContent::Varints,
    }
}

/// Creates the shape of a type without repeated values.
const fn shape(
    of: WireMessage,
    name: &'static str,
    messages_max: usize,
    fields: &'static [WireField],
) -> WireShape {
    WireShape {
        of,
        name,
        messages_max,
        values_max: 0,
        fields,
    }
}

const fn with_values(values_max: usize, shape: WireShape) -> WireShape {
    WireShape {
        values_max,
        ..shape
    }
}

/// All types, in the order of [`WireMessage`].
#[rustfmt::skip]
static SHAPES: [WireShape; TYPES] = [
    shape(M::DaemonMessage, "DaemonMessage", 1, &[
        message(1, M::Welcome), message(2, M::PoolUpdate), message(3, M::Metrics), message(4, M::PeerLoad),
        message(40, M::LearnedModels),
    ]),
    with_values(POOLS_ASKED_MAX, shape(M::Welcome, "Welcome", 1, &[texts(3), texts(4)])),
    shape(M::PoolUpdate, "PoolUpdate", 1, &[
        message(2, M::Version), message(3, M::Endpoint), message(7, M::Pipeline), message(8, M::Objects),
        message(65, M::ModelSet),
    ]),
    shape(M::Endpoint, "Endpoint", ENDPOINTS_DECODED_MAX, &[message(6, M::Label)]),
    with_values(NAMES_MAX, shape(M::ModelSet, "ModelSet", ENDPOINTS_MAX, &[texts(1)])),
    shape(M::Label, "Label", LABELS_PER_ENDPOINT_MAX * ENDPOINTS_MAX, &[]),
    shape(M::Pipeline, "Pipeline", 1, &[message(1, M::Plugin), message(2, M::Profile)]),
    shape(M::Profile, "Profile", PROFILES_MAX, &[message(4, M::ProfilePlugin)]),
    shape(M::ProfilePlugin, "ProfilePlugin", PROFILES_MAX * PLUGINS_MAX, &[]),
    shape(M::Plugin, "Plugin", PLUGINS_MAX, &[message(4, M::Parameter)]),
    shape(M::Parameter, "Parameter", PARAMETERS_MAX, &[message(5, M::ParameterList), message(6, M::ParameterMap)]),
    shape(M::ParameterList, "ParameterList", PARAMETERS_MAX, &[message(1, M::Parameter)]),
    shape(M::ParameterMap, "ParameterMap", PARAMETERS_MAX, &[message(1, M::Parameter)]),
    shape(M::Objects, "Objects", 1, &[message(1, M::Objective), message(2, M::Model), message(3, M::Rewrite)]),
    shape(M::Objective, "Objective", OBJECTS_MAX, &[]),
    shape(M::Model, "Model", OBJECTS_MAX, &[message(3, M::Target)]),
    with_values(OBJECTS_MAX * TARGETS_MAX, shape(M::Rewrite, "Rewrite", OBJECTS_MAX, &[texts(1), message(2, M::Target)])),
    shape(M::Target, "Target", 2 * OBJECTS_MAX * TARGETS_MAX, &[]),
    shape(M::Metrics, "Metrics", 1, &[
        message(2, M::Version), message(9, M::Lora), message(10, M::Attribute), message(11, M::MetricColumn),
    ]),
    shape(M::MetricColumn, "MetricColumn", 256, &[]),
    shape(M::Attribute, "Attribute", ATTRIBUTES_MAX, &[]),
    with_values(NAMES_MAX, shape(M::Lora, "Lora", ENDPOINTS_MAX, &[texts(2), texts(3), texts(5)])),
    shape(M::PeerLoad, "PeerLoad", 1, &[]),
    shape(M::LearnedModels, "LearnedModels", 1, &[message(2, M::Version)]),
    shape(M::Version, "Version", VMS_PER_REPORT_MAX, &[]),
    shape(M::ProxyMessage, "ProxyMessage", 1, &[
        message(1, M::Hello), message(2, M::Ack), message(3, M::Report), message(4, M::LoadReport),
        message(40, M::Observations), message(41, M::LearnedModels),
    ]),
    with_values(POOLS_ASKED_MAX, shape(M::Hello, "Hello", 1, &[texts(4)])),
    shape(M::Ack, "Ack", 1, &[message(2, M::Version), message(4, M::Version)]),
    shape(M::Report, "Report", 1, &[part(1, M::VmCounters)]),
    shape(M::VmCounters, "VmCounters", VMS_PER_REPORT_MAX, &[
        message(3, M::EndpointCounters), message(4, M::ModelCounters), message(5, M::Count), message(6, M::Histogram),
        message(9, M::Version), message(15, M::BandCounters),
    ]),
    with_values(16 * BAND_ROWS_MAX, shape(M::BandCounters, "BandCounters", BAND_ROWS_MAX, &[varints(4), message(5, M::Histogram)])),
    shape(M::EndpointCounters, "EndpointCounters", ENDPOINT_ROWS_MAX, &[]),
    with_values(16 * MODEL_ROWS_MAX, shape(M::ModelCounters, "ModelCounters", MODEL_ROWS_MAX, &[
        message(4, M::Count), message(5, M::Histogram), message(6, M::Histogram), message(7, M::Histogram),
        varints(15), varints(16),
    ])),
    shape(M::Count, "Count", COUNTS_MAX, &[]),
    with_values((crate::HISTOGRAM_BOUNDS.len() + 1) * HISTOGRAMS_MAX, shape(M::Histogram, "Histogram", HISTOGRAMS_MAX, &[varints(1)])),
    shape(M::LoadReport, "LoadReport", 1, &[]),
    shape(M::Observations, "Observations", 1, &[]),
];

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
