//! The committed code matches the protocol files.

use std::path::Path;

#[test]
fn the_committed_code_is_what_state_proto_generates() {
    compare(
        "state.proto",
        "switchpoint.state.v1.rs",
        "crate::limited_codec::LimitedCodec",
    );
}

#[test]
fn the_committed_code_is_what_externalscaler_proto_generates() {
    compare(
        "externalscaler.proto",
        "externalscaler.rs",
        "tonic_prost::ProstCodec",
    );
}

/// Generates the code without `protoc`, and compares it with the committed code. If they differ,
/// the message says how to update the committed code.
fn compare(protocol: &str, name: &str, codec: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    let descriptors = protox::compile([protocol], [root]).unwrap();
    tonic_prost_build::configure()
        .build_server(true)
        .build_client(true)
        .server_mod_attribute(".", "#[cfg(feature = \"grpc\")]")
        .client_mod_attribute(".", "#[cfg(feature = \"grpc\")]")
        .btree_map(".")
        .codec_path(codec)
        .out_dir(folder.path())
        .compile_fds(descriptors)
        .unwrap();
    let generated = folder.path().join(name);
    let committed = root.join("src/gen").join(name);
    let [new, old] = [&generated, &committed].map(|path| std::fs::read_to_string(path).unwrap());
    if new != old {
        let kept = std::env::temp_dir().join(name);
        std::fs::write(&kept, &new).unwrap();
        panic!(
            "{protocol} and the committed code differ; take it over with: cp {} {}",
            kept.display(),
            committed.display()
        );
    }
}
