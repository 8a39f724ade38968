//! Two workers of a process pick, while their load reports and rings in shared data are replaced by
//! any bytes, and the daemon sends any load of other proxies. Nothing may panic, and when all
//! requests have ended, no worker may have own requests in flight.
#![no_main]

use std::cell::RefCell;
use std::rc::Rc;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use proto::placements;
use proto::state::{PeerLoad, daemon_message};
use proxy_wasm::traits::{Context, HttpContext};
use scheduler::{EndpointRef, Generation, Slot};
use switchpoint::config::FilterConfig;
use switchpoint::fake::{FakeHost, encode, pool_update_message};
use switchpoint::host::{BodyBuffer, Host, WriteCondition};
use switchpoint::http::HttpStreamContext;
use switchpoint::vm::VmState;
use switchpoint::shared_data::snapshot_store::SharedSnapshotStore;

#[derive(Arbitrary, Debug)]
enum SharingEvent {
    Tick {
        vm: bool,
    },
    Pass {
        ms: u16,
    },
    Request {
        vm: bool,
        prompt: u8,
    },
    Answered {
        stream: u8,
        details: u8,
        upstream: u8,
    },
    Done {
        stream: u8,
    },
    PoolUpdate {
        endpoints: u8,
        sequence: u8,
    },
    /// Writes any bytes to one of the filter's keys. [`Self::Changed`] changes only one byte.
    Garbage {
        key: u8,
        bytes: Vec<u8>,
    },
    Changed {
        key: u8,
        at: u16,
        to: u8,
    },
    PeerLoad {
        proxies: u8,
        row: Vec<u8>,
        slot: u16,
        blocks: Vec<u64>,
    },
    Replace {
        vm: bool,
    },
}

const KEYS: [&str; 7] = [
    "row/0",
    "row/1",
    "row/2",
    "row/outside",
    "ring/0/1",
    "ring/1/1",
    "ring/1/2",
];
const ADDRESSES: [&str; 3] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];
const PROMPTS: [usize; 4] = [0, 30, 300, 3_000];

struct World {
    host: FakeHost,
    config: Rc<FilterConfig>,
    vms: [Rc<RefCell<VmState<FakeHost>>>; 2],
    streams: Vec<(usize, HttpStreamContext<FakeHost>)>,
}

impl World {
    fn new() -> Self {
        let host = FakeHost::new();
        let config = Rc::new(
            FilterConfig::parse(br#"{"pools": [{"name": "default"}], "prefix_entries": 512}"#)
                .unwrap(),
        );
        let vms = [vm(&host, &config), vm(&host, &config)];
        Self {
            host,
            config,
            vms,
            streams: Vec::new(),
        }
    }

    fn pool_update(&self, endpoints: u8, sequence: u8) {
        let version = scheduler::Version {
            term: 1,
            sequence: u64::from(sequence),
        };
        let pool_update =
            pool_update_message("default", version, &ADDRESSES[..usize::from(endpoints) % 4]);
        let _ = SharedSnapshotStore::new("default").publish_pool_update(
            &self.host,
            1,
            version,
            &pool_update,
            self.host.now(),
        );
        for vm in &self.vms {
            let replica = vm.borrow().replica("default").unwrap();
            replica.borrow_mut().refresh(&self.host).unwrap();
        }
    }

    fn request(&mut self, vm: usize, prompt: u8) {
        let prompt = "many words ".repeat(PROMPTS[usize::from(prompt) % 4]);
        let body = format!(r#"{{"model":"m","prompt":"{prompt}"}}"#);
        *self.host.http.request.borrow_mut() = vec![
            (":method".into(), "POST".into()),
            (":path".into(), "/v1/completions".into()),
        ];
        self.host
            .http
            .buffers
            .borrow_mut()
            .insert(BodyBuffer::RequestBody as u32, body.clone().into());
        let id = 10 + self.streams.len() as u32;
        let mut stream = HttpStreamContext::new(
            id,
            self.host.clone(),
            Rc::clone(&self.vms[vm]),
            Rc::clone(&self.config),
        );
        let _ = stream.on_http_request_headers(2, false);
        let _ = stream.on_http_request_body(body.len(), true);
        self.streams.push((vm, stream));
    }

    fn answered(&mut self, stream: u8, details: u8, upstream: u8) {
        let count = self.streams.len().max(1);
        let Some((_, stream)) = self.streams.get_mut(usize::from(stream) % count) else {
            return;
        };
        let details = [
            "via_upstream",
            "upstream_reset_before_response_started{}",
            "",
        ][usize::from(details) % 3];
        let mut properties = self.host.properties.borrow_mut();
        properties.insert("response.code_details".into(), details.into());
        properties.insert(
            "upstream.address".into(),
            ADDRESSES[usize::from(upstream) % 3].into(),
        );
        properties.insert(
            "upstream.request_attempt_count".into(),
            3_u64.to_le_bytes().into(),
        );
        drop(properties);
        *self.host.http.response.borrow_mut() = vec![(":status".into(), "200".into())];
        let _ = stream.on_http_response_headers(1, false);
    }
}

fn vm(host: &FakeHost, config: &Rc<FilterConfig>) -> Rc<RefCell<VmState<FakeHost>>> {
    let mut vm = VmState::new(host.clone());
    vm.configure(1, Rc::clone(config));
    Rc::new(RefCell::new(vm))
}

fn key(key: u8) -> String {
    format!(
        "switchpoint/1/pool/default/{}",
        KEYS[usize::from(key) % KEYS.len()]
    )
}

fuzz_target!(|events: Vec<SharingEvent>| {
    let mut world = World::new();
    world.pool_update(3, 1);
    for vm in &world.vms {
        vm.borrow_mut().tick(1);
    }
    for event in events.into_iter().take(100) {
        match event {
            SharingEvent::Tick { vm } => drop(world.vms[usize::from(vm)].borrow_mut().tick(1)),
            SharingEvent::Pass { ms } => world.host.pass_ms(u64::from(ms)),
            SharingEvent::Request { vm, prompt } => world.request(usize::from(vm), prompt),
            SharingEvent::Answered {
                stream,
                details,
                upstream,
            } => world.answered(stream, details, upstream),
            SharingEvent::Done { stream } if !world.streams.is_empty() => {
                let at = usize::from(stream) % world.streams.len();
                world.streams.swap_remove(at).1.on_done();
            }
            SharingEvent::Done { .. } => {}
            SharingEvent::PoolUpdate {
                endpoints,
                sequence,
            } => world.pool_update(endpoints, sequence),
            SharingEvent::Garbage { key: at, bytes } => world
                .host
                .share(&key(at), &bytes, WriteCondition::Any)
                .unwrap(),
            SharingEvent::Changed {
                key: at,
                at: byte,
                to,
            } => {
                let held = world.host.shared(&key(at)).unwrap();
                if let Some(mut bytes) = held
                    .map(|shared| shared.bytes)
                    .filter(|bytes| !bytes.is_empty())
                {
                    let byte = usize::from(byte) % bytes.len();
                    bytes[byte] = to;
                    world
                        .host
                        .share(&key(at), &bytes, WriteCondition::Any)
                        .unwrap();
                }
            }
            SharingEvent::PeerLoad {
                proxies,
                row,
                slot,
                blocks,
            } => {
                let endpoint = EndpointRef {
                    slot: Slot(slot),
                    generation: Generation(1),
                };
                let mut placements = Vec::new();
                placements::push(&mut placements, endpoint, &blocks);
                // Then adds bytes that may not be a placement.
                placements.extend_from_slice(&row);
                let peers = PeerLoad {
                    pool: "default".into(),
                    proxies: u32::from(proxies),
                    row,
                    placements,
                    ..PeerLoad::default()
                };
                let bytes = encode(daemon_message::Message::PeerLoad(peers));
                let size = bytes.len();
                let stream = world.host.grpc.streams.borrow().len() as u32;
                world
                    .host
                    .http
                    .buffers
                    .borrow_mut()
                    .insert(BodyBuffer::StreamMessage as u32, bytes);
                drop(world.vms[0].borrow_mut().on_stream_message(1, stream, size));
            }
            SharingEvent::Replace { vm: which } => {
                // The streams of the VM get no more callbacks.
                let which = usize::from(which);
                world.streams.retain(|(vm, _)| *vm != which);
                world.vms[which] = vm(&world.host, &world.config);
                let replica = world.vms[which].borrow().replica("default").unwrap();
                replica.borrow_mut().refresh(&world.host).unwrap();
            }
        }
    }
    for (_, mut stream) in world.streams.drain(..) {
        stream.on_done();
    }
    for vm in &world.vms {
        let replica = vm.borrow().replica("default").unwrap();
        assert_eq!(replica.borrow().pool.in_flight().rows().count(), 0);
    }
});
