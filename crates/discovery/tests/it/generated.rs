//! The committed code is the code generated from `etcd.proto`.

use std::path::Path;

/// Generates the code without `protoc`, and compares it with the committed code. If they differ,
/// the message says how to update the committed code.
#[test]
fn the_committed_code_is_what_etcd_proto_generates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let descriptors = protox::compile(["etcd.proto"], [root]).unwrap();
    tonic_prost_build::configure()
        .build_server(false)
        .out_dir(folder.path())
        .compile_fds(descriptors)
        .unwrap();
    let name = "etcdserverpb.rs";
    let generated = folder.path().join(name);
    let committed = root.join("src/etcd/gen").join(name);
    let [new, old] =
        [&generated, &committed].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    if new != old {
        let kept = std::env::temp_dir().join(name);
        std::fs::write(&kept, &new).unwrap();
        panic!(
            "etcd.proto and the committed code differ; take it over with: cp {} {}",
            kept.display(),
            committed.display()
        );
    }
}
