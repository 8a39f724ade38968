//! Values outside protobuf: each is written as its golden bytes and read back from them. A change
//! of these bytes is a change of the format: during an upgrade the VMs of a process, or the proxies
//! and the daemon, may be of two releases.

use std::fmt::Debug;
use std::path::Path;

use proto::load_report::{
    FailureEntry, LoadReportHead, LoadReportLayout, append_failure, append_slos, decode_failure,
    decode_load, decode_slos, encode_load,
};
use proto::observation::EncodedObservation;
use proto::placements::PlacementKind;
use proto::shared_data::{
    CrashRecord, DecodingMark, LeaseValue, MessageStamp, PlacementEntry, RemotePeers, RingPosition,
    SegmentHead, SnapshotHead, VmEntry, flow_order, room_ask,
};
use proto::{frames, placements};
use scheduler::flow::{
    BandAccount, BandService, FlowAccount, FullEndpoint, OrderRow, OwnerShare, QueuedInBand,
    QueuedTag, RoomAsk, RowBand, SharedOrder,
};
use scheduler::in_flight::{EndpointLoad, PendingPrefills};
use scheduler::latency::step::StepModel;
use scheduler::latency::{Conditions, FirstToken, LatencyModel, Observation, RequestEnd, TokenGap};
use scheduler::{EndpointRef, Generation, Slot, Timestamp, Version};

const VM: u64 = 0x00ab_cdef;

/// Returns the bytes of a file: hexadecimal, with comments from `#` to the end of a line.
pub(crate) fn golden(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let code = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
    let digits: String = text.lines().map(code).collect();
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect()
}

/// Checks that `write` gives exactly the bytes of the file, and that `read` returns `value` from
/// them.
fn holds<T: Debug + PartialEq>(
    name: &str,
    value: &T,
    write: impl Fn(&T) -> Vec<u8>,
    read: impl Fn(&[u8]) -> Option<T>,
) {
    let golden = golden(&format!("{name}.hex"));
    assert_eq!(write(value), golden, "{name} is written otherwise");
    assert_eq!(
        read(&golden).as_ref(),
        Some(value),
        "{name} is read otherwise"
    );
}

fn at(slot: u16, generation: u32) -> EndpointRef {
    EndpointRef {
        slot: Slot(slot),
        generation: Generation(generation),
    }
}

fn ms(ms: u64) -> Timestamp {
    Timestamp(0).plus_ms(ms)
}

#[test]
fn load_report() {
    let load = EndpointLoad {
        requests: 3,
        prefill_tokens: 1_500,
        decode_tokens: 640,
        prefills: PendingPrefills {
            prompts: 2,
            prompt_tokens: 1_200,
            uncached_tokens: 800,
            attention: 77,
        },
        ..EndpointLoad::default()
    };
    let most = EndpointLoad {
        requests: 65_535,
        prefill_tokens: u64::from(u32::MAX),
        ..EndpointLoad::default()
    };
    let slos = EndpointLoad {
        ttft_slo_us: Some(250_000),
        ..EndpointLoad::default()
    };
    let failures = [
        FailureEntry {
            endpoint: at(4, 1),
            since: ms(2),
            until: ms(9),
            failures: 3,
            outside: false,
            by_answers: true,
        },
        FailureEntry {
            endpoint: at(5, 1),
            since: ms(3),
            until: ms(0),
            failures: 0,
            outside: true,
            by_answers: false,
        },
    ];
    let head = LoadReportHead {
        vm: 7,
        written: ms(5),
        ring: RingPosition {
            segment: 3,
            bytes: 4_096,
        }
        .to_word(),
    };
    let layout = LoadReportLayout {
        head,
        loads: 2,
        slos: 1,
        failures: 2,
    };

    let mut written = Vec::new();
    layout.append(&mut written);
    written.extend(encode_load(at(2, 9), &load));
    written.extend(encode_load(
        at(1_023, u32::MAX),
        &EndpointLoad {
            requests: 70_000,
            prefill_tokens: u64::MAX,
            ..most
        },
    ));
    append_slos(&mut written, at(2, 9), &slos);
    failures
        .iter()
        .for_each(|failure| append_failure(&mut written, failure));
    let bytes = golden("load_report.hex");
    assert_eq!(written, bytes);

    let read = LoadReportLayout::parse(&bytes).unwrap();
    assert_eq!(read, layout);
    assert_eq!(
        read.loads(&bytes)
            .iter()
            .map(decode_load)
            .collect::<Vec<_>>(),
        [Some((at(2, 9), load)), Some((at(1_023, u32::MAX), most))]
    );
    assert_eq!(
        read.slos(&bytes)
            .iter()
            .map(decode_slos)
            .collect::<Vec<_>>(),
        [Some((at(2, 9), slos))]
    );
    assert_eq!(
        read.failures(&bytes)
            .iter()
            .map(decode_failure)
            .collect::<Vec<_>>(),
        failures.map(Some)
    );
}

#[test]
fn observation() {
    let conditions = Conditions {
        queued: Some(2.0),
        running: None,
        requests: 5.0,
        prefill_tokens: 900.0,
        context_tokens: 4_000.0,
        kv_utilization: Some(0.5),
        prompt_tokens: 1_000.0,
        uncached_tokens: 250.0,
    };
    let observation = Observation {
        endpoint: at(3, 7),
        conditions,
        ended: RequestEnd::Done,
        ttft_ms: Some(120.5),
        tpot_ms: Some(8.25),
        output_tokens: Some(64),
        first_token: Some(FirstToken {
            uncached_tokens: 250.0,
            prompt_tokens: 1_000.0,
            service_ms: 60.0,
        }),
        gap: Some(TokenGap {
            batch: 4.0,
            context_tokens: 4_000.0,
            gap_ms: 8.0,
        }),
    };
    let encoded = EncodedObservation {
        observation,
        predicted: None,
        prompt_tokens: Some(1_002),
        cached_tokens: None,
        estimated: true,
    };
    holds(
        "observation",
        &encoded,
        |value| value.to_bytes().to_vec(),
        |bytes| EncodedObservation::from_bytes(bytes.try_into().ok()?),
    );
}

#[test]
fn placements_and_frames() {
    let placed = vec![
        (at(3, 7), vec![0x1111_1111_1111_1111, 0x2222_2222_2222_2222]),
        (at(1_023, 1), vec![0xfedc_ba98_7654_3210]),
    ];
    let write = |placed: &Vec<(EndpointRef, Vec<u64>)>| {
        let mut bytes = Vec::new();
        placed
            .iter()
            .for_each(|(endpoint, blocks)| placements::push(&mut bytes, *endpoint, blocks));
        bytes
    };
    holds("placements", &placed, write, |bytes| {
        Some(placements::each(bytes).collect())
    });
    let claimed = vec![
        (
            PlacementKind::Unconfirmed,
            at(3, 7),
            vec![0x1111_1111_1111_1111],
        ),
        (
            PlacementKind::Withdrawn,
            at(3, 7),
            vec![0x1111_1111_1111_1111],
        ),
        (
            PlacementKind::OverShare,
            at(1_023, 1),
            vec![0xfedc_ba98_7654_3210],
        ),
    ];
    let write = |claimed: &Vec<(PlacementKind, EndpointRef, Vec<u64>)>| {
        let mut bytes = Vec::new();
        for (kind, endpoint, blocks) in claimed {
            placements::push_claim(&mut bytes, *kind, *endpoint, blocks);
        }
        bytes
    };
    holds("claims", &claimed, write, |bytes| {
        Some(placements::each_claim(bytes).collect())
    });

    let write = |messages: &Vec<Vec<u8>>| {
        let mut bytes = Vec::new();
        messages
            .iter()
            .for_each(|message| frames::push(&mut bytes, message));
        bytes
    };
    let read = |mut bytes: &[u8]| {
        let mut messages = Vec::new();
        while let Some((message, rest)) = frames::take(bytes) {
            messages.push(message.to_vec());
            bytes = rest;
        }
        bytes.is_empty().then_some(messages)
    };
    holds("frames", &vec![b"abc".to_vec(), Vec::new()], write, read);
}

#[test]
fn learned_models() {
    let to_bytes = |words: Vec<u32>| {
        words
            .into_iter()
            .flat_map(u32::to_le_bytes)
            .collect::<Vec<u8>>()
    };
    let to_words = |bytes: &[u8]| {
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word))
            .collect::<Vec<u32>>()
    };
    let step = StepModel::default().with_speed(at(1, 7), 2.0, 0.5);
    holds(
        "step_model",
        &step,
        |model| to_bytes(model.words()),
        |bytes| StepModel::from_words(&to_words(bytes)).ok(),
    );
    let latency = LatencyModel::constant(120.0, 9.0).with_endpoint(at(1, 5), 2.0, 0.5);
    holds(
        "latency_model",
        &latency,
        |model| to_bytes(model.words()),
        |bytes| LatencyModel::from_words(&to_words(bytes)).ok(),
    );
}

#[test]
fn values_of_the_leader() {
    let lease = LeaseValue {
        epoch: 4,
        holder: VM,
        until: ms(3_000),
    };
    holds(
        "lease",
        &lease,
        |lease| lease.to_bytes(),
        LeaseValue::from_bytes,
    );
    let mark = DecodingMark {
        vm: VM,
        digest: 0x0123_4567_89ab_cdef,
    };
    holds(
        "decoding_mark",
        &mark,
        |mark| mark.to_bytes(),
        DecodingMark::from_bytes,
    );
    let record = CrashRecord {
        lost_at: ms(7),
        digests: vec![2, 1],
    };
    holds("crash_record", &record, CrashRecord::to_bytes, |bytes| {
        Some(CrashRecord::from_bytes(bytes))
    });
}

#[test]
fn snapshot_store() {
    let version = Version {
        term: 1_795_276_089_863,
        sequence: 42,
    };
    let head = SnapshotHead::default()
        .with_pool_update(4, version)
        .with_metrics(4, 43);
    assert!(head.pool_update_side() && head.metrics_side());
    holds(
        "snapshot_head",
        &head,
        |head| head.to_bytes(),
        SnapshotHead::from_bytes,
    );
    let stamp = MessageStamp {
        epoch: 4,
        version,
        metrics_sequence: 43,
        received: ms(5),
    };
    let read = |bytes: &[u8]| {
        MessageStamp::split(bytes)
            .filter(|(_, message)| *message == b"abc")
            .map(|(stamp, _)| stamp)
    };
    holds("snapshot_side", &stamp, |stamp| stamp.before(b"abc"), read);
}

#[test]
fn vm_table_and_peers() {
    let rows = vec![
        VmEntry {
            vm: VM,
            heartbeat: ms(9),
            queue: 3,
            serves: true,
        },
        VmEntry::default(),
    ];
    holds(
        "vm_table",
        &rows,
        |rows| VmEntry::write_table(rows),
        |bytes| Some(VmEntry::read_table(bytes, 9)),
    );
    let peers = RemotePeers {
        proxies: 4,
        active: 3,
        delay_us: 1_500,
        holds: false,
    };
    let read = |bytes: &[u8]| {
        bytes
            .try_into()
            .ok()
            .map(|word| RemotePeers::of_word(u64::from_le_bytes(word)))
    };
    holds(
        "remote_peers",
        &peers,
        |peers| peers.to_word().to_le_bytes().to_vec(),
        read,
    );
}

#[test]
fn queued_requests() {
    let tag = QueuedTag {
        owed: true,
        priority: -10,
        flow: 5,
        rank: 1.5,
        key: 7,
    };
    let bands = vec![RowBand {
        queued: QueuedInBand {
            priority: -10,
            requests: 3,
            bytes: 900,
        },
        largest: OwnerShare {
            owner: 0x1111,
            requests: 2,
            bytes: 800,
        },
        refuse: 2,
    }];
    let first = OrderRow {
        vm: VM,
        written: ms(5),
        woken: ms(4),
        round: 8,
        first: Some(tag),
        next: None,
        bands,
        endpoints: vec![(at(2, 5), -10)],
    };
    let second = OrderRow {
        vm: 9,
        next: Some(QueuedTag { owed: false, ..tag }),
        ..OrderRow::default()
    };
    let flow = FlowAccount {
        start: 12.0,
        turn: 4,
        attained: 0.5,
        attained_at: ms(3),
    };
    let account = BandAccount {
        virtual_time: 11.0,
        turn: 5,
    };
    let band = BandService {
        priority: -10,
        credit: 2.5,
        account,
        flows: vec![(0x1111, flow)],
    };
    let full = vec![FullEndpoint {
        endpoint: at(3, 7),
        priority: -10,
        tries: 2,
    }];
    let order = SharedOrder {
        round: 9,
        began: ms(6),
        rows: vec![first, second],
        bands: vec![band],
        full,
    };
    holds("flow_order", &order, flow_order::write, flow_order::read);
    let bytes = flow_order::write(&order);
    assert!(
        (0..bytes.len()).all(|cut| flow_order::read(&bytes[..cut]).is_none()),
        "half an order is none"
    );
}

#[test]
fn asks_for_room() {
    let ask = RoomAsk {
        endpoint: Some(at(3, 7)),
        priority: -10,
    };
    holds(
        "room_ask",
        &ask,
        |ask| room_ask::write("p", *ask, 4),
        |bytes| Some(room_ask::read(bytes)?.1),
    );
    for ask in [
        ask,
        RoomAsk {
            endpoint: None,
            priority: 10,
        },
    ] {
        let bytes = room_ask::write("default", ask, 4);
        assert_eq!(room_ask::read(&bytes), Some(("default", ask, 4)));
        assert!((0..24).all(|cut| room_ask::read(&bytes[..cut]).is_none()));
    }
    assert!(
        [&b"held"[..], b"leader", &[0xff; 40]]
            .iter()
            .all(|other| room_ask::read(other).is_none())
    );
}

#[test]
fn rings() {
    let head = SegmentHead { vm: VM, number: 3 };
    let mut written = Vec::new();
    head.append(&mut written);
    PlacementEntry::append(
        &mut written,
        PlacementKind::Confirmed,
        at(3, 7),
        &[0x1111_1111_1111_1111, 0x2222_2222_2222_2222],
        1,
    );
    PlacementEntry::append(&mut written, PlacementKind::Unconfirmed, at(4, 1), &[], 0);
    let bytes = golden("placement_segment.hex");
    assert_eq!(written, bytes);
    let (read, entries) = SegmentHead::split(&bytes).unwrap();
    assert_eq!(read, head);
    let (first, entries) = PlacementEntry::split(entries).unwrap();
    assert_eq!(
        (first.kind, first.endpoint, first.blocks, first.known),
        (
            PlacementKind::Confirmed,
            at(3, 7),
            &[[0x11; 8], [0x22; 8]][..],
            1
        )
    );
    let (second, entries) = PlacementEntry::split(entries).unwrap();
    assert_eq!(
        (
            second.kind,
            second.endpoint,
            second.blocks.len(),
            second.known,
            entries.len()
        ),
        (PlacementKind::Unconfirmed, at(4, 1), 0, 0, 0)
    );

    let write = |head: &SegmentHead| {
        let mut bytes = Vec::new();
        head.append(&mut bytes);
        bytes
    };
    holds(
        "observation_segment",
        &SegmentHead { vm: VM, number: 64 },
        write,
        |bytes| SegmentHead::split(bytes).map(|(head, _)| head),
    );
}
