//! Raw text as a configuration file: every item has an answer, and an accepted file gives a
//! pipeline that can be built and shown.

#![no_main]

use control_plane::config::{ItemStatus, ResolvedConfig, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (report, config) = read(text);
    let refused = report
        .items
        .iter()
        .any(|item| item.status == ItemStatus::Refused);
    match config {
        Some(config) => {
            assert!(report.errors.is_empty() && !refused);
            scheduler::Pipeline::build(&config.pipeline)
                .expect("a pipeline the filter would refuse");
            assert_eq!(
                ResolvedConfig::from_spec(&config.pipeline).profiles.len(),
                config.pipeline.profiles.len()
            );
        }
        None => assert!(
            !report.errors.is_empty() || refused,
            "refused without a reason"
        ),
    }
});
