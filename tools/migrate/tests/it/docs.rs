//! The table of `docs/how-to/migrate.md` matches the code.

use std::path::Path;

use migrate::table_markdown;

/// The two lines of `docs/how-to/migrate.md` between which the table is printed. The rest of the
/// page is written by hand.
const TABLES: [&str; 2] = ["<!-- tables: begin -->\n", "<!-- tables: end -->\n"];

#[test]
fn docs_of_migration_are_fresh() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/how-to/migrate.md");
    let written = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = written.split_once(TABLES[0]).unwrap();
    let (_, after) = rest.split_once(TABLES[1]).unwrap();
    let page = format!(
        "{before}{}\n{}\n{}{after}",
        TABLES[0],
        table_markdown(),
        TABLES[1]
    );
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&file, &page).unwrap();
    }
    let written = std::fs::read_to_string(&file).unwrap();
    assert!(
        written == page,
        "docs/how-to/migrate.md is stale: UPDATE_DOCS=1 cargo test -p migrate --test it docs"
    );
}
