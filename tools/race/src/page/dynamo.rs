//! The cells with Dynamo's engines.

use race_cells::Cell;

use super::{MarkdownTable, cell_text, percent};
use crate::results::{FigureResult, RaceResults};

/// The group of routers that runs in these cells.
pub(super) const GROUP: &str = "dynamo";

const HEAD: &str = "## Engines that we did not write

Dynamo's mocker has a scheduler, a KV cache and a speed of its own. Three of them serve the sessions of a cell. For
ours and smg each has a frontend, which makes it an OpenAI server; `dynamo-kv` is one frontend of Dynamo with
`--router-mode kv` before all three, which gets their KV events. Ours has its default policy and the port of the
metrics. The routers ran one after the other, while the machine compiled other programs at the lowest priority, and
there is no run of ours against ours: a small difference means nothing. The tokenizer has 2.5 bytes of this text to a
token, where our model server counts four.

Times are end to end only. The frontends do not set `TCP_NODELAY`, so tokens wait for the acknowledgement of those
before them, and when a client sees the first tokens depends on the router's connections. The loopback acknowledges at
once, which prevents most of that; the last byte of a reply does not depend on it. Hits are the `cached_tokens` in the
usage of all replies. Requests by engine are the count of `vllm:e2e_request_latency_seconds` on each mocker's page;
they include none of the start. How late a mocker's steps end is not known, only how late the clients were.

vllm-router 0.1.17 does not run over these engines. With `--policy kv_aware` and the events of each mocker
(`--kv-event-source`) it connects, but it lets the engine make tokens of a prompt by `/v1/chat/completions/render`;
Dynamo's frontend answers that with 404, so each of 12 decisions lacked tokens. Then all 12 requests failed, whatever
the choice: the router adds parameters such as `separate_reasoning` and `no_stop_trim` to a chat request, and the
frontend refuses unknown ones with 400.

";

/// The table of these cells; empty without a result.
pub(super) fn section(results: &RaceResults) -> String {
    let mut table = MarkdownTable::with_header(&[
        "cell",
        "router",
        "version",
        "end to end, warm",
        "cold",
        "hits",
        "requests",
        "failed",
        "by engine",
    ]);
    let mut loads = Vec::new();
    for result in results.of_group(GROUP) {
        let rate = Cell::find(&result.cell)
            .and_then(|cell| cell.sessions_per_s())
            .unwrap_or_default();
        let stacks = super::stacks_of(result);
        loads.push(format!(
            "{}: {rate:.2} sessions/s, {:.0} s of arrivals, {stacks}",
            result.cell, result.arrivals_s
        ));
        for router in &result.routers {
            let end_to_end =
                |figures: &[FigureResult]| figures.first().map_or_else(String::new, cell_text);
            let engines: Vec<String> = router.by_engine.iter().map(ToString::to_string).collect();
            let names = [
                result.cell.clone(),
                router.router.clone(),
                router.version.clone(),
            ];
            let times = [
                end_to_end(&router.warm),
                end_to_end(&router.cold),
                percent(router.hit_rate),
            ];
            let counts = [
                router.requests.to_string(),
                router.failures.to_string(),
                engines.join(" "),
            ];
            table.row(names.into_iter().chain(times).chain(counts));
        }
    }
    if loads.is_empty() {
        String::new()
    } else {
        format!(
            "{HEAD}Half of what round robin can serve.\n{}.\n\n{}\n",
            loads.join(";\n"),
            table.0
        )
    }
}
