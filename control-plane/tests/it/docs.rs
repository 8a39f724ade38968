//! The printed pages of the documentation match the code.

use std::path::Path;

use control_plane::config::reference_page;

#[test]
fn docs_of_plugins_are_fresh() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/plugins.md");
    let page = reference_page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(
        written == page,
        "docs/reference/plugins.md is stale; the first lines of the page say how to print it again"
    );
}
