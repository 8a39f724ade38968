//! The page's section on the cells (workload and load) with Dynamo's engines.

use super::{MarkdownTable, cell_text, counts_of};
use crate::results::{FigureResult, RaceResults};

/// The group of routers that runs in the cells with Dynamo's engines.
pub(super) const GROUP: &str = "dynamo";

const HEAD: &str = "## Engines that we did not write

The engines are three of Dynamo's mockers (simulated engines), which have a scheduler, a KV cache and a speed of their
own. The load is half of what round robin serves. Switchpoint and smg have a frontend before each mocker; `dynamo-kv` is
one frontend with `--router-mode kv` before all three. The routers ran one after the other on a busy machine, without a
second Switchpoint run, so a small difference means nothing. Only end-to-end times are compared, because the frontends
delay single tokens (no `TCP_NODELAY`). vllm-router 0.1.17 fails here, because the frontend refuses parameters that
vllm-router adds.

";

/// Returns the section with a table of the cells with Dynamo's engines, or an empty text without
/// results.
pub(super) fn section(results: &RaceResults) -> String {
    if results.of_group(GROUP).next().is_none() {
        return String::new();
    }
    let mut table = MarkdownTable::with_header(&[
        "cell",
        "router",
        "end to end, warm",
        "cold",
        "hits",
        "failed",
        "busiest",
    ]);
    for result in results.of_group(GROUP) {
        for router in &result.routers {
            let end_to_end =
                |figures: &[FigureResult]| figures.first().map_or_else(String::new, cell_text);
            let head = [
                result.cell.clone(),
                router.router.clone(),
                end_to_end(&router.warm),
                end_to_end(&router.cold),
            ];
            table.row(head.into_iter().chain(counts_of(router)));
        }
    }
    format!("{HEAD}{}\n", table.0)
}
