//! Reads any bytes as a header map, or as a subset hint. The map must be read as it was written,
//! and no endpoint outside the hint may be picked.
#![no_main]

use std::cell::RefCell;
use std::rc::Rc;

use libfuzzer_sys::fuzz_target;
use proxy_wasm::traits::{Context, HttpContext};
use switchpoint::config::FilterConfig;
use switchpoint::fake::{FakeHost, pool_update_message};
use switchpoint::host::Host;
use switchpoint::http::HttpStreamContext;
use switchpoint::pairs::{HeaderPairs, serialize};
use switchpoint::vm::VmState;
use switchpoint::shared_data::snapshot_store::SharedSnapshotStore;

const HINT: &str =
    "metadata.filter_metadata.envoy.lb.subset_hint.x-gateway-destination-endpoint-subset";
const ADDRESSES: [&str; 3] = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"];

fuzz_target!(|bytes: &[u8]| {
    let read: Vec<(&[u8], &[u8])> = HeaderPairs::new(bytes).collect();
    let text = |bytes| std::str::from_utf8(bytes).ok();
    let texts: Option<Vec<(&str, &str)>> = read
        .iter()
        .map(|(name, value)| Some((text(name)?, text(value)?)))
        .collect();
    if let Some(texts) = texts {
        let written = serialize(&texts);
        assert!(HeaderPairs::new(&written).eq(read.iter().copied()));
    }

    let host = FakeHost::new();
    let config = Rc::new(
        FilterConfig::parse(br#"{"pools": [{"name": "default"}], "prefix_entries": 0}"#).unwrap(),
    );
    let vm = Rc::new(RefCell::new(VmState::new(host.clone())));
    vm.borrow_mut().configure(1, Rc::clone(&config));
    let version = scheduler::Version {
        term: 1,
        sequence: 1,
    };
    let replica = vm.borrow().replica("default").unwrap();
    SharedSnapshotStore::new("default")
        .publish_pool_update(
            &host,
            1,
            version,
            &pool_update_message("default", version, &ADDRESSES),
            host.now(),
        )
        .unwrap();
    replica.borrow_mut().refresh(&host).unwrap();
    host.properties
        .borrow_mut()
        .insert(HINT.into(), bytes.to_vec());
    *host.http.request.borrow_mut() = vec![
        (":method".into(), "GET".into()),
        (":path".into(), "/v1/models".into()),
    ];
    let mut stream = HttpStreamContext::new(10, host.clone(), vm, config);
    stream.on_http_request_headers(2, true);
    let request = host.http.request.borrow();
    for (_, destination) in request
        .iter()
        .filter(|(name, _)| name == "x-gateway-destination-endpoint")
    {
        for endpoint in destination.split(',') {
            assert!(ADDRESSES.contains(&endpoint));
            // The hint must name the endpoint, by address or by IP.
            let ip = endpoint.split(':').next().unwrap();
            assert!(
                bytes.windows(ip.len()).any(|word| word == ip.as_bytes()),
                "{endpoint}"
            );
        }
    }
    drop(request);
    stream.on_done();
});
