//! `switchpoint-migrate`: reads the values of llm-d's charts, or the objects of a running endpoint
//! picker, and prints the values of our chart with a report on each item.
//!
//! ```text
//!  values.yaml ─▶ values ──┐                    ┌─▶ chart ─▶ values.yaml
//!                          ├─▶ items, by table ─┼─▶ picker ─▶ EndpointPickerConfig
//!  objects ─▶ objects ─────┘                    └─▶ report
//! ```

#![forbid(unsafe_code)]

mod chart;
mod command;
mod defaults;
mod items;
mod objects;
mod page;
mod picker;
mod printer;
mod report;
mod table;
mod tree;
mod values;

pub use command::{MigrateArgs, Migrated, run};
pub use page::table_markdown;

use items::GivenItems;

/// One endpoint picker of llm-d.
#[derive(Debug)]
pub struct LlmdPicker {
    /// The name of the picker's pool.
    name: String,
    /// The namespace of the picker's pool, if known.
    namespace: Option<String>,
    /// The place of the picker's configuration in the input, and the text of the configuration.
    config: Option<(String, String)>,
    /// All items that the input sets for the picker.
    items: GivenItems,
    /// Whether the picker has a proxy of its own, instead of a gateway that reads InferencePools.
    standalone: bool,
}
