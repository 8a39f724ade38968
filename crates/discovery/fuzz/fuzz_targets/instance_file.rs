//! Reads raw text as an instance file. The file is refused with a reason, or it is read. The reader
//! never panics.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(
    |text: &[u8]| match discovery::directory::parse("instance", text) {
        Ok((record, heartbeat)) =>
            assert!(record.name() == "instance" && heartbeat.is_none_or(|h| !h.is_zero())),
        Err(why) => assert!(!why.is_empty()),
    }
);
