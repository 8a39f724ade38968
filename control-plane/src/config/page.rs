//! Prints `docs/reference/plugins.md` from the tables that the reader uses.

use scheduler::registry::reference_markdown;

use super::older;
use super::reference_items::{FEATURE_GATES, FOREIGN, ItemSupport, PARAMETERS};

const HEAD: &str = "\
# Plugins and configuration

The tests print this page from the code: `UPDATE_DOCS=1 cargo test -p control-plane --test daemon docs`. `switchpointd
check FILE` shows what a configuration file does. See also [differences from llm-d](differences.md).

An endpoint's total is the sum of its scores (0 to 1), each multiplied by its weight (default 1). Plugins, parameters
and defaults are llm-d-router's unless the text says otherwise.
";

/// The formula of the default scorer; the page shows it once.
const COST: &str = "\
## The cost of `marginal-cost-scorer`

`switchpointd explain` prints the terms of the cost for each endpoint; [the default policy](../explanation/policy.md)
explains them.

```
cost = wait + prefill + delay + decode + memory + failure

wait     W (ttftWeight + queueExternality b)
prefill  ttftWeight S (1 + B (W + S/2) / T)
delay    b S
decode   o w (e0 + e1 (b+1) + e2 (k+n) + b (e1 + e2 n))
memory   E / (1-E) c1 (u-m) (1 + Bmean)
failure  failureMs f

W = v (c0 P / (1 + P/4) + c1 Pu + c2 Pq) (P - 1/2) / P + o w D min(u, missing) / C
S = v (c0 + c1 x + c2 (n^2 - (n-x)^2)) + A
x = m + (u-m) r / (1+r)
D = e0 + e1 (B+1) + e2 (K+n)
T = o w D + W + S
b = (B + Bmean) / 2,  k = (K + Kmean) / 2
```

| symbol | meaning |
|---|---|
| u, n | prompt tokens not cached here; all prompt tokens |
| m | the least u of all candidates: u-m tokens are computed here although another endpoint has them |
| r | 1/r more requests will use a new copy: those that arrive until the endpoint has computed another prompt, and the rest of the conversation; a billion if the longest cached prefix was requested once |
| x | tokens that are charged: all 1 + 1/r requests pay for the copy |
| W, S | wait for prefill and KV memory; prefill of the charged tokens |
| D, T | one decode step with this request; lifetime of the request |
| P, Pu, Pq | prompts that wait here; their uncached tokens; their pairs of tokens |
| B, K | requests in flight here; their context tokens |
| Bmean, Kmean | means of B and K over the candidates |
| b, k | the expected batch: half of the requests here will have ended, and the usual number takes their place |
| o | expected output tokens; 0 before the decode stage |
| v, w | prefill and decode time of this endpoint relative to the average |
| c0 c1 c2, e0 e1 e2 | learned coefficients of a prefill step and of a decode step |
| C, missing | KV memory in tokens; what this request needs beyond the free part |
| A | time to load the LoRA adapter; 0 for [names of the base model](../how-to/discovery.md#metadata-of-an-instance) |
| E | share of computed prompt tokens that had been cached and were evicted, lately; at most 0.95 |
| f | failure rate here minus the rate at other endpoints |

A higher `ttftWeight` shortens the longest TTFTs and makes whole requests a little slower. A higher `queueExternality`
keeps queues more even, at the same price; with 0, bursts of unlike prompts wait longer
([figures](race-simulator.md#the-parameters)). To serve the most requests within their SLOs, set `ttftWeight` to 2 and
`queueExternality` to 0.

";

/// Returns the text of the page, Markdown.
#[must_use]
pub fn reference_page() -> String {
    let mut page = format!("{HEAD}\n{}{COST}", reference_markdown());
    let configured = FOREIGN.iter().filter_map(|row| match row.support {
        ItemSupport::Implemented(what) => Some((row.name.to_owned(), what.to_owned())),
        _ => None,
    });
    let title = "## Types that are not plugins here";
    add_table(&mut page, title, "type | what it configures", configured);
    let no_effect = FOREIGN.iter().filter_map(|row| match row.support {
        ItemSupport::NoEffect(why) => Some((row.name.to_owned(), why.to_owned())),
        _ => None,
    });
    let title = "\n## Types of llm-d-router without effect here";
    add_table(&mut page, title, "types | why", no_effect);
    add_refusals(&mut page);
    let moved = older::moved_names().map(|(plugin_type, name, now)| {
        (format!("{plugin_type}.{name}"), format!("read as {now}"))
    });
    let answered = PARAMETERS.iter().map(|row| {
        let usual = if row.usual.is_empty() {
            ""
        } else {
            "other values than the usual one are "
        };
        (
            format!("{}.{}", row.plugin_type, row.way.join(".")),
            format!("{usual}{}", answer(row.support)),
        )
    });
    let title = "\n## Parameters of llm-d-router that the plugins here do not have";
    add_table(
        &mut page,
        title,
        "parameters | result",
        moved.chain(answered),
    );
    let gates = FEATURE_GATES
        .iter()
        .map(|(name, support)| ((*name).to_owned(), answer(*support)));
    let title = "\n## Feature gates, when on";
    add_table(&mut page, title, "gates | result", gates);
    page
}

fn add_refusals(page: &mut String) {
    page.push_str("\n## Types of llm-d-router that are refused\n");
    let refused = || {
        FOREIGN.iter().filter_map(|row| match row.support {
            ItemSupport::Refused(why, instead) => Some((row.name, why, instead)),
            _ => None,
        })
    };
    let mut reasons: Vec<&str> = refused().map(|(_, why, _)| why).collect();
    reasons.dedup(); // `FOREIGN` keeps the types with one reason together
    for reason in reasons {
        let types = refused()
            .filter(|(_, why, _)| *why == reason)
            .map(|(name, _, instead)| (name.to_owned(), instead.to_owned()));
        let title = format!("\nReason: {reason}.");
        add_table(page, &title, "types | instead", types);
    }
}

/// Adds a table with a row for each reason, and the names that share it.
fn add_table(
    page: &mut String,
    title: &str,
    columns: &str,
    rows: impl Iterator<Item = (String, String)>,
) {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for (name, reason) in rows {
        let name = format!("`{name}`");
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(name),
            None => reasons.push((reason, vec![name])),
        }
    }
    page.push_str(&format!("{title}\n\n| {columns} |\n|---|---|\n"));
    for (reason, names) in reasons {
        page.push_str(&format!("| {} | {reason} |\n", names.join(", ")));
    }
}

/// Formats what is reported about an item as one phrase.
fn answer(support: ItemSupport) -> String {
    match support {
        ItemSupport::Implemented(what) | ItemSupport::FlowControl(what) => what.to_owned(),
        ItemSupport::NoEffect(why) => format!("no effect: {why}"),
        ItemSupport::Refused(why, instead) => format!("refused: {why}; instead: {instead}"),
    }
}
