//! Raw text as a configuration file: answered for, item by item, and what is taken is a profile that can be built.

#![no_main]

use control_plane::config::{Status, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (report, config) = read(text);
    let refused = report.items.iter().any(|item| item.status == Status::Refused);
    match config {
        Some(config) => {
            assert!(report.errors.is_empty() && !refused);
            scheduler::Profile::build(&config.profile).expect("a profile the filter would refuse");
        }
        None => assert!(!report.errors.is_empty() || refused, "refused without a word"),
    }
});
