//! Reads raw text as an endpoints file. The file is refused with a reason, or it gives a set that
//! keeps every rule. The reader never panics.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| match discovery::file::parse(text) {
    Ok(instances) => assert_eq!(discovery::validate(&instances), Ok(())),
    Err(why) => assert!(!why.is_empty()),
});
