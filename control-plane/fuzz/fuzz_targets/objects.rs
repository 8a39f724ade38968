//! Raw text as a file of objects: every object is accepted or has an error, and accepted objects of
//! a pool can be built as in a filter.

#![no_main]

use control_plane::pool::objects::{ObjectSelection, of_pool, read};
use discovery::file_watcher::FileSet;
use libfuzzer_sys::fuzz_target;
use scheduler::objects::{ModelRequest, Objects};

fuzz_target!(|text: &str| {
    let (report, objects) = read(text);
    let files = FileSet(vec![("f".into(), text.to_owned())]);
    for object in &objects {
        match of_pool(&files, &ObjectSelection::for_pool(&object.pool)) {
            Ok(found) => {
                assert!(report.errors.is_empty());
                let compiled =
                    Objects::build(&found.spec).expect("objects that the filter would refuse");
                let model = found.spec.models.first().map_or("m", |model| &model.name);
                let _ = compiled.resolve(
                    ModelRequest {
                        model,
                        objective: Some(&object.name),
                        rewrite: Some(model),
                    },
                    |_| false,
                    &mut scheduler::Rng::seeded(1),
                );
            }
            Err(why) => assert!(!why.is_empty(), "refused without a reason"),
        }
    }
});
