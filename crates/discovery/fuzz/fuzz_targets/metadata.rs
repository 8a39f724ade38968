//! Reads raw text as the metadata of an instance. The reader never panics. It refuses the text with
//! a reason, or returns metadata that survives writing and reading and never routes traffic to
//! another host.

#![no_main]

use std::net::SocketAddr;

use discovery::Metadata;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// Whether the values are equal, except for the last digit of numbers, which is not read exactly.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) if a != b => {
            let a = a.as_f64().unwrap();
            let b = b.as_f64().unwrap();
            (a - b).abs() <= (1e-15 * a.abs().max(b.abs())).max(f64::MIN_POSITIVE)
        }
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}

fuzz_target!(|text: &[u8]| {
    let Ok(metadata) = Metadata::parse(text) else {
        return;
    };
    let written = serde_json::to_vec(metadata.map()).unwrap();
    let read = Metadata::parse(&written).unwrap();
    assert!(
        same(&read.map().clone().into(), &metadata.map().clone().into()),
        "{read:?} and {metadata:?}"
    );
    let own = SocketAddr::from(([10, 0, 0, 1], 80));
    if let Ok(Some(address)) = metadata.transport(own) {
        assert!(address.ip() == own.ip() && address.port() != 0);
    }
    assert!(metadata.models().iter().all(|model| !model.name.is_empty()));
});
