//! A daemon and a module of neighbouring releases understand each other. The test makes the schemas
//! of the other releases from `state.proto`. The schema of the next release has a further field in
//! each message and a further kind of message. The schema of the last release lacks the newest
//! field of each message.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use prost::Message;
use proto::state;
use protox::prost_reflect::prost_types::field_descriptor_proto::{Label, Type};
use protox::prost_reflect::prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorSet,
};
use protox::prost_reflect::{
    Cardinality, DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MapKey, MessageDescriptor,
    ReflectMessage, Value,
};

use crate::golden_values::golden;

const PACKAGE: &str = "switchpoint.state.v1";

/// The number of the field that the next release adds to each message.
const NEXT: i32 = 15_000;

/// The messages that are encoded alone, not only as a part of other messages.
const ROOTS: [&str; 3] = ["DaemonMessage", "ProxyMessage", "VmCounters"];

/// The number of different values of a root message without a oneof.
const ALTERNATIVES: usize = 8;

/// The number of elements of a list. Each element takes another alternative.
const ELEMENTS: usize = 3;

/// The maximum depth of nested messages. Deeper messages are empty, because a parameter may contain
/// parameters.
const DEPTH_MAX: usize = 7;

fn set() -> FileDescriptorSet {
    protox::compile(["state.proto"], [Path::new(env!("CARGO_MANIFEST_DIR"))]).unwrap()
}

/// Returns the messages of this release after a change of each message.
fn changed(change: &impl Fn(&mut DescriptorProto)) -> DescriptorPool {
    fn walk(message: &mut DescriptorProto, change: &impl Fn(&mut DescriptorProto)) {
        if !message
            .options
            .as_ref()
            .is_some_and(|options| options.map_entry())
        {
            change(message);
        }
        message
            .nested_type
            .iter_mut()
            .for_each(|nested| walk(nested, change));
    }
    let mut set = set();
    set.file
        .iter_mut()
        .flat_map(|file| &mut file.message_type)
        .for_each(|message| walk(message, change));
    DescriptorPool::from_file_descriptor_set(set).unwrap()
}

fn message(pool: &DescriptorPool, name: &str) -> MessageDescriptor {
    pool.get_message_by_name(&format!("{PACKAGE}.{name}"))
        .unwrap()
}

/// Returns a message with a value in every field. `seen` gets the names of the messages in it.
fn filled(
    of: &MessageDescriptor,
    alternative: usize,
    depth: usize,
    seen: &mut BTreeSet<String>,
) -> DynamicMessage {
    seen.insert(of.name().to_owned());
    let mut filled = DynamicMessage::new(of.clone());
    if depth == DEPTH_MAX {
        return filled;
    }
    let oneofs: BTreeMap<String, usize> = of
        .oneofs()
        .map(|oneof| (oneof.name().to_owned(), alternative % oneof.fields().len()))
        .collect();
    for field in of.fields() {
        if let Some(oneof) = field.containing_oneof()
            && oneof.fields().position(|other| other == field) != oneofs.get(oneof.name()).copied()
        {
            continue;
        }
        let mut value =
            |kind: &Kind, element: usize| some(kind, alternative + element, depth, seen);
        let value = match field.kind() {
            Kind::Message(entry) if field.is_map() => Value::Map(
                [(
                    MapKey::String("k".to_owned()),
                    value(&entry.map_entry_value_field().kind(), 0),
                )]
                .into(),
            ),
            kind if field.is_list() => {
                Value::List((0..ELEMENTS).map(|element| value(&kind, element)).collect())
            }
            kind => value(&kind, 0),
        };
        filled.set_field(&field, value);
    }
    filled
}

/// Returns a value that is not the default.
fn some(kind: &Kind, alternative: usize, depth: usize, seen: &mut BTreeSet<String>) -> Value {
    match kind {
        Kind::Double => Value::F64(0.5),
        Kind::Float => Value::F32(0.5),
        Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => Value::I32(3),
        Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => Value::I64(3),
        Kind::Uint32 | Kind::Fixed32 => Value::U32(3),
        Kind::Uint64 | Kind::Fixed64 => Value::U64(3),
        Kind::Bool => Value::Bool(true),
        Kind::String => Value::String("x".to_owned()),
        Kind::Bytes => Value::Bytes(vec![1, 2].into()),
        Kind::Enum(_) => Value::EnumNumber(1),
        Kind::Message(of) => Value::Message(filled(of, alternative, depth + 1, seen)),
    }
}

/// Reads the bytes as this release does, and writes what it understood.
fn read_again(root: &str, bytes: &[u8]) -> Vec<u8> {
    match root {
        "DaemonMessage" => state::DaemonMessage::decode(bytes).unwrap().encode_to_vec(),
        "ProxyMessage" => state::ProxyMessage::decode(bytes).unwrap().encode_to_vec(),
        "VmCounters" => state::VmCounters::decode(bytes).unwrap().encode_to_vec(),
        other => panic!("{other} is no root"),
    }
}

/// Returns the value of the bytes under the other release's schema.
fn understood(pool: &DescriptorPool, root: &str, bytes: &[u8]) -> DynamicMessage {
    DynamicMessage::decode(message(pool, root), bytes).unwrap()
}

/// Adds a field to the message, and another kind of message to the oneof of a root.
fn add_next_field(message: &mut DescriptorProto) {
    let field = |name: &str, number: i32, oneof_index| FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(Type::String.into()),
        oneof_index,
        ..FieldDescriptorProto::default()
    };
    let is_root = message
        .oneof_decl
        .iter()
        .any(|oneof| oneof.name() == "message");
    message.field.push(field("of_next_release", NEXT, None));
    if is_root {
        message
            .field
            .push(field("kind_of_next_release", NEXT + 1, Some(0)));
    }
}

fn remove_newest_field(message: &mut DescriptorProto) {
    let newest = message
        .field
        .iter()
        .filter(|field| field.oneof_index.is_none())
        .map(FieldDescriptorProto::number)
        .max();
    message.field.retain(|field| Some(field.number()) != newest);
}

/// Returns the number of kinds of a root message, or `ALTERNATIVES` if the message has only one
/// kind.
fn kinds(root: &MessageDescriptor) -> usize {
    root.oneofs()
        .next()
        .map_or(ALTERNATIVES, |oneof| oneof.fields().len())
}

#[test]
fn messages_of_the_next_release_are_read_without_what_it_added() {
    let now = changed(&|_| {});
    let next = changed(&add_next_field);
    let mut seen = BTreeSet::new();
    for root in ROOTS {
        for alternative in 0..kinds(&message(&now, root)) {
            let written = filled(&message(&next, root), alternative, 0, &mut seen).encode_to_vec();
            let meant = filled(&message(&now, root), alternative, 0, &mut seen);
            assert!(written.len() > meant.encoded_len());
            assert_eq!(
                understood(&now, root, &read_again(root, &written)),
                meant,
                "{root}, alternative {alternative}"
            );
        }
        if message(&now, root).oneofs().len() > 0 {
            let new_kind = filled(
                &message(&next, root),
                kinds(&message(&now, root)),
                0,
                &mut seen,
            );
            assert!(new_kind.has_field_by_name("kind_of_next_release"));
            assert!(
                read_again(root, &new_kind.encode_to_vec()).is_empty(),
                "{root}: an unknown kind of message is an empty message"
            );
        }
    }
    let all: BTreeSet<String> = now
        .all_messages()
        .filter(|m| !m.is_map_entry())
        .map(|m| m.name().to_owned())
        .collect();
    assert_eq!(
        all.difference(&seen).collect::<Vec<_>>(),
        Vec::<&String>::new(),
        "messages that no root contains"
    );
}

#[test]
fn messages_of_the_last_release_are_read_and_it_reads_ours() {
    let now = changed(&|_| {});
    let last = changed(&remove_newest_field);
    let mut seen = BTreeSet::new();
    for root in ROOTS {
        for alternative in 0..kinds(&message(&now, root)) {
            let written = filled(&message(&last, root), alternative, 0, &mut seen);
            let read = understood(&last, root, &read_again(root, &written.encode_to_vec()));
            assert_eq!(
                read, written,
                "{root}, alternative {alternative}: a field that it does not have is no error"
            );
            let ours = filled(&message(&now, root), alternative, 0, &mut seen).encode_to_vec();
            assert_eq!(
                known(&understood(&last, root, &ours)),
                written,
                "{root}, alternative {alternative}"
            );
        }
    }
}

/// Returns the message without unknown fields, at every depth.
fn known(message: &DynamicMessage) -> DynamicMessage {
    fn value(of: &Value) -> Value {
        match of {
            Value::Message(message) => Value::Message(known(message)),
            Value::List(list) => Value::List(list.iter().map(value).collect()),
            Value::Map(map) => Value::Map(
                map.iter()
                    .map(|(key, of)| (key.clone(), value(of)))
                    .collect(),
            ),
            other => other.clone(),
        }
    }
    let mut clean = DynamicMessage::new(message.descriptor());
    message
        .fields()
        .for_each(|(field, of)| clean.set_field(&field, value(of)));
    clean
}

/// Returns the fields of all messages: `Message.field number type`, with `*` for repeated fields
/// and maps.
fn fields(pool: &DescriptorPool) -> Vec<String> {
    let kind = |field: &FieldDescriptor| match field.kind() {
        Kind::Message(of) => of
            .full_name()
            .trim_start_matches(PACKAGE)
            .trim_start_matches('.')
            .to_owned(),
        Kind::Enum(of) => of.name().to_owned(),
        other => format!("{other:?}").to_lowercase(),
    };
    let line = |of: &MessageDescriptor, field: &FieldDescriptor| {
        let many = if field.cardinality() == Cardinality::Repeated {
            "*"
        } else {
            ""
        };
        let name = of
            .full_name()
            .trim_start_matches(PACKAGE)
            .trim_start_matches('.');
        format!(
            "{name}.{} {} {}{many}",
            field.name(),
            field.number(),
            kind(field)
        )
    };
    let mut all: Vec<String> = pool
        .all_messages()
        .flat_map(|of| of.fields().map(|f| line(&of, &f)).collect::<Vec<_>>())
        .collect();
    all.sort();
    all
}

/// Checks that every field of release 0.1.0 still exists with its number and type, or its number is
/// reserved.
#[test]
fn no_field_of_a_release_is_renumbered_or_changes_its_type() {
    let pool = changed(&|_| {});
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/fields-0.1.0.txt");
    let text = std::fs::read_to_string(path).unwrap();
    let now: BTreeSet<String> = fields(&pool).into_iter().collect();
    let mut recorded = 0;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        recorded += 1;
        let [field, number, _] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let of = field.rsplit_once('.').unwrap().0;
        let number = number.parse::<u32>().unwrap();
        let reserved = pool
            .get_message_by_name(&format!("{PACKAGE}.{of}"))
            .is_some_and(|of| of.reserved_ranges().any(|range| range.contains(&number)));
        assert!(
            now.contains(line) || reserved,
            "{line}: removed without `reserved {number}`, or changed"
        );
    }
    assert!(recorded > 100, "{recorded} fields");
}

/// Tests the golden pool update with unknown fields beside each of its fields.
#[test]
fn a_pool_update_of_the_next_release_means_the_same() {
    let next = changed(&add_next_field);
    let bytes = golden("pool_update.hex");
    let mut newer = understood(&next, "DaemonMessage", &bytes);
    add_values(&mut newer);
    let newer = newer.encode_to_vec();
    assert!(newer.len() > bytes.len() + 50, "unknown fields are in it");
    let read = |bytes: &[u8]| match state::DaemonMessage::decode(bytes).unwrap().message {
        Some(state::daemon_message::Message::PoolUpdate(pool_update)) => {
            proto::pool_update(pool_update).unwrap()
        }
        _ => panic!("not a pool update"),
    };
    assert_eq!(format!("{:?}", read(&newer)), format!("{:?}", read(&bytes)));
}

/// Gives the field of the next release a value, at every depth.
fn add_values(message: &mut DynamicMessage) {
    if message
        .descriptor()
        .get_field_by_name("of_next_release")
        .is_some()
    {
        message.set_field_by_name("of_next_release", Value::String("x".to_owned()));
    }
    for (_, value) in message.fields_mut() {
        match value {
            Value::Message(message) => add_values(message),
            Value::List(list) => list
                .iter_mut()
                .filter_map(Value::as_message_mut)
                .for_each(add_values),
            Value::Map(map) => map
                .values_mut()
                .filter_map(Value::as_message_mut)
                .for_each(add_values),
            _ => {}
        }
    }
}
