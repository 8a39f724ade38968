//! Puts any load report into an engine's reply. The metrics that are read from it must be numbers,
//! and the client must not see the report.
#![no_main]

use std::cell::RefCell;
use std::rc::Rc;

use libfuzzer_sys::fuzz_target;
use proxy_wasm::traits::{Context, HttpContext};
use switchpoint::config::FilterConfig;
use switchpoint::fake::{FakeHost, metrics_message, pool_update_message};
use switchpoint::host::Host;
use switchpoint::http::HttpStreamContext;
use switchpoint::vm::VmState;
use switchpoint::shared_data::snapshot_store::SharedSnapshotStore;

fuzz_target!(|report: &[u8]| {
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
            &pool_update_message("default", version, &["10.0.0.1:1"]),
            host.now(),
        )
        .unwrap();
    let metrics = metrics_message("default", version, 1, &[1.0]);
    SharedSnapshotStore::new("default")
        .publish_metrics(&host, 1, (version, 1), &metrics, host.now())
        .unwrap();
    replica.borrow_mut().refresh(&host).unwrap();
    *host.http.request.borrow_mut() = vec![
        (":method".into(), "GET".into()),
        (":path".into(), "/v1/models".into()),
    ];
    let mut stream = HttpStreamContext::new(10, host.clone(), vm, config);
    stream.on_http_request_headers(2, true);
    let mut properties = host.properties.borrow_mut();
    properties.insert("response.code_details".into(), b"via_upstream".to_vec());
    properties.insert("upstream.address".into(), b"10.0.0.1:1".to_vec());
    properties.insert(
        "upstream.request_attempt_count".into(),
        1_u64.to_le_bytes().to_vec(),
    );
    drop(properties);
    let report = String::from_utf8_lossy(report).into_owned();
    *host.http.response.borrow_mut() = vec![
        (":status".into(), "200".into()),
        ("endpoint-load-metrics".into(), report),
    ];
    stream.on_http_response_headers(2, true);
    assert!(
        host.http
            .response
            .borrow()
            .iter()
            .all(|(name, _)| name != "endpoint-load-metrics")
    );
    stream.on_done();
    let replica = replica.borrow();
    for metrics in replica.pool.snapshot().unwrap().metrics() {
        assert!(
            metrics
                .queue_depth
                .is_none_or(|depth| depth.is_finite() && depth >= 0.0)
        );
        assert!(
            metrics
                .kv_cache_utilization
                .is_none_or(|share| (0.0..=1.0).contains(&share))
        );
    }
});
