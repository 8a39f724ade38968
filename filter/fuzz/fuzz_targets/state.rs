//! Two VMs receive any messages from the daemon, die and are replaced, while another plugin may
//! write any bytes to the filter's keys in shared data. Nothing may panic, and no VM may go back to
//! an older version while only the filter writes its keys.
#![no_main]

use std::rc::Rc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use switchpoint::config::FilterConfig;
use switchpoint::fake::{FakeHost, metrics_message, pool_update_message};
use switchpoint::host::{BodyBuffer, Host, WriteCondition};
use switchpoint::vm::VmState;
use switchpoint::state_link::CallResponse;

#[derive(Arbitrary, Debug)]
enum StateEvent {
    Tick {
        vm: bool,
    },
    Pass {
        ms: u16,
    },
    Raw {
        vm: bool,
        bytes: Vec<u8>,
    },
    PoolUpdate {
        vm: bool,
        term: u8,
        sequence: u8,
        endpoints: u8,
    },
    Metrics {
        vm: bool,
        term: u8,
        sequence: u8,
        pool_update: u8,
        queues: Vec<u8>,
    },
    Closed {
        vm: bool,
    },
    /// A call gets an answer with any bytes, or with these messages.
    Answered {
        vm: bool,
        back: u8,
        status: u8,
        raw: Option<Vec<u8>>,
        pool_updates: Vec<(u8, u8, u8)>,
    },
    Wake {
        vm: bool,
        queue: u8,
    },
    Replace {
        vm: bool,
    },
    Garbage {
        key: u8,
        bytes: Vec<u8>,
    },
}

const KEYS: [&str; 12] = [
    "switchpoint/1/leader",
    "switchpoint/1/vms",
    "switchpoint/1/process",
    "switchpoint/1/decoding",
    "switchpoint/1/crash_guard",
    "switchpoint/1/pool/default/head",
    "switchpoint/1/pool/default/pool_update/a",
    "switchpoint/1/pool/default/pool_update/b",
    "switchpoint/1/pool/default/metrics/a",
    "switchpoint/1/pool/default/metrics/b",
    "switchpoint/1/pool/default/counters/0",
    "switchpoint/1/pool/default/counters/1",
];
const ADDRESSES: [&str; 4] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:1", "not an address"];

/// Makes a VM that is connected by HTTP calls or by a stream.
fn vm(host: &FakeHost, calls: bool) -> VmState<FakeHost> {
    let config: &[u8] = if calls {
        br#"{"pools": [{"name": "default"}], "state": {"transport": "http"}}"#
    } else {
        br#"{"pools": [{"name": "default"}]}"#
    };
    let mut vm = VmState::new(host.clone());
    vm.configure(1, Rc::new(FilterConfig::parse(config).unwrap()));
    vm
}

fn answer(status: u8, raw: Option<Vec<u8>>, pool_updates: &[(u8, u8, u8)]) -> CallResponse {
    let mut body = raw.unwrap_or_default();
    for (term, sequence, endpoints) in pool_updates.iter().take(4) {
        let addresses = &ADDRESSES[..usize::from(*endpoints) % 5];
        proto::frames::push(
            &mut body,
            &pool_update_message("default", scheduler_version(*term, *sequence), addresses),
        );
    }
    let status = [Some(&b"200"[..]), Some(b"503"), Some(b"\xff"), None][usize::from(status) % 4];
    CallResponse {
        status: status.map(<[u8]>::to_vec),
        body,
    }
}

fn message(host: &FakeHost, vm: &mut VmState<FakeHost>, bytes: Vec<u8>) {
    let size = bytes.len();
    let stream = host.grpc.streams.borrow().len() as u32;
    host.http
        .buffers
        .borrow_mut()
        .insert(BodyBuffer::StreamMessage as u32, bytes);
    vm.on_stream_message(1, stream, size);
}

fuzz_target!(|events: Vec<StateEvent>| {
    let host = FakeHost::new();
    let mut vms = [vm(&host, false), vm(&host, true)];
    let mut newest = [Default::default(); 2];
    let mut ours_alone = true;
    for event in events.into_iter().take(200) {
        let version = |term: u8, sequence: u8| scheduler_version(term, sequence);
        match event {
            StateEvent::Tick { vm } => drop(vms[usize::from(vm)].tick(1)),
            StateEvent::Pass { ms } => host.pass_ms(u64::from(ms)),
            StateEvent::Raw { vm, bytes } => message(&host, &mut vms[usize::from(vm)], bytes),
            StateEvent::PoolUpdate {
                vm,
                term,
                sequence,
                endpoints,
            } => {
                let addresses = &ADDRESSES[..usize::from(endpoints) % 5];
                message(
                    &host,
                    &mut vms[usize::from(vm)],
                    pool_update_message("default", version(term, sequence), addresses),
                );
            }
            StateEvent::Metrics {
                vm,
                term,
                sequence,
                pool_update,
                queues,
            } => {
                let queues: Vec<f32> = queues
                    .iter()
                    .take(4)
                    .map(|q| if *q == 255 { f32::NAN } else { f32::from(*q) })
                    .collect();
                message(
                    &host,
                    &mut vms[usize::from(vm)],
                    metrics_message(
                        "default",
                        version(term, pool_update),
                        u64::from(sequence),
                        &queues,
                    ),
                );
            }
            StateEvent::Closed { vm } => {
                let stream = host.grpc.streams.borrow().len() as u32;
                if stream > 0 {
                    vms[usize::from(vm)].on_stream_closed(1, stream, "gone");
                }
            }
            StateEvent::Answered {
                vm,
                back,
                status,
                raw,
                pool_updates,
            } => {
                let call =
                    (host.grpc.calls.borrow().len() as u32).wrapping_sub(u32::from(back % 4));
                drop(vms[usize::from(vm)].on_call_response(
                    1,
                    call,
                    answer(status, raw, &pool_updates),
                ));
            }
            StateEvent::Wake { vm, queue } => {
                let queues = host.queues.borrow().len() as u32;
                if queues > 0 {
                    drop(vms[usize::from(vm)].on_wake(u32::from(queue) % queues + 1));
                }
            }
            StateEvent::Replace { vm: which } => {
                vms[usize::from(which)] = vm(&host, which);
                newest[usize::from(which)] = Default::default();
            }
            StateEvent::Garbage { key, bytes } => {
                ours_alone = false;
                host.share(
                    KEYS[usize::from(key) % KEYS.len()],
                    &bytes,
                    WriteCondition::Any,
                )
                .unwrap();
            }
        }
        for (vm, newest) in vms.iter().zip(&mut newest) {
            let version = vm.replica("default").unwrap().borrow().version();
            assert!(!ours_alone || version >= *newest);
            *newest = version;
        }
    }
});

fn scheduler_version(term: u8, sequence: u8) -> scheduler::Version {
    scheduler::Version {
        term: u64::from(term % 3),
        sequence: u64::from(sequence),
    }
}
