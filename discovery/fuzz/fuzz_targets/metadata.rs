//! What an instance may answer: refused with a reason, or metadata that says the same when written and read again; never a panic, and never traffic for
//! another host.

#![no_main]

use std::net::SocketAddr;

use discovery::Metadata;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let Ok(metadata) = Metadata::parse(text) else { return };
    let written = serde_json::to_vec(metadata.map()).unwrap();
    assert_eq!(Metadata::parse(&written).as_ref(), Ok(&metadata));
    let own = SocketAddr::from(([10, 0, 0, 1], 80));
    if let Ok(Some(address)) = metadata.transport(own) {
        assert!(address.ip() == own.ip() && address.port() != 0);
    }
    assert!(metadata.models().iter().all(|model| !model.name.is_empty()));
});
