//! Prints `docs/reference/plugins.md` from the tables that the reader uses.

use std::fmt::Write;

use scheduler::registry::reference_markdown;

use super::reference_items::{FEATURE_GATES, FOREIGN, ItemSupport, ReferencePlugin};

const HEAD: &str = "\
# Plugins and configuration

The tests print this page from the code; do not edit it: `UPDATE_DOCS=1 cargo test -p control-plane --test it docs`.
`switchpointd check FILE` shows what a configuration file does. See also [differences from llm-d](differences.md).

An endpoint's total is the sum of its scores (0 to 1), each multiplied by its weight (default 1). Plugins, parameters
and defaults are llm-d-router's unless the text says otherwise.
";

/// The formula of the default scorer, once.
const COST: &str = "\
## The cost of `marginal-cost-scorer`

Costs are in milliseconds. `switchpointd explain` prints the terms of each endpoint.

```
cost = max(queue + prefill + interference + displacement + decode - refresh, W + S) + failure

queue         W (1 + queueExternality (B + Bmean) / 2)
prefill       S (1 + arrivalExternality B W / T)
interference  externality (ownBatchShare B S + (1 - ownBatchShare) Bmean (S + Smean) / 2)
displacement  displacement r / (1 + r) c1 u
decode        decodeWeight o w (D + B (e1 + e2 n) / 2)
refresh       refresh a (1 - U/C) (Sn - Su) (1 + externality (ownBatchShare B + (1 - ownBatchShare) Bmean))
failure       failureMs f

W = v (c0 P / (1 + P/4) + c1 Pu + c2 Pq) + memoryWeight o w D min(u, missing) / C
S = v (c0 + c1 u + c2 (n^2 - (n-u)^2)) + A
D = e0 + e1 (B+1) + e2 (K+n)
T = o w D + W + S
```

| term | why it counts |
|---|---|
| queue | prompts ahead come first; a long queue becomes a large batch |
| prefill | this prompt's prefill; requests that arrive while it waits are delayed too |
| interference | prefill delays running requests, here and, as load moves, elsewhere |
| displacement | a new copy evicts other prefixes; counts less if the prefix is used often |
| decode | its own decode steps, and the delay of others |
| refresh | use one of several copies before it is evicted |
| failure | requests fail more often here than elsewhere |

| symbol | meaning |
|---|---|
| u, n | prompt tokens not cached here; all prompt tokens |
| W, S, Smean | wait for prefill and KV memory; prefill time of this prompt; the same where v = 1 |
| Sn, Su | prefill time of n and of u tokens, without A |
| D, T | one decode step with this request; lifetime of the request |
| P, Pu, Pq | prompts that wait here; their uncached tokens; their pairs of tokens |
| B, Bmean, K | requests in flight here; their mean over the candidates; context tokens of those here |
| o | expected output tokens; 0 before the decode stage |
| v, w | prefill and decode time of this endpoint relative to the average |
| c0 c1 c2, e0 e1 e2 | learned coefficients of a prefill step and of a decode step |
| C, U, missing | KV memory in tokens: all; in use; needed by this request and not free |
| A | time to load the LoRA adapter; 0 for the base model, which the label `model_name` of the metrics names |
| a | tokens cached here since the prefix was last used, as a share of what fits |
| r | prompts per endpoint since the longest cached prefix was last used |
| f | failure rate here minus the rate at other endpoints |

The defaults aim at low latency. Three of them are for the time being: displacement 10, ownBatchShare 1 and decodeWeight
1 were 55, 0.22 and 0.6. In seven runs beside the cache-aware policy of SGLang's gateway (eight simulated engines in
real time) mean end-to-end time is 0.946 of its, p99 TTFT 0.53. Where prompts fill the caches, a displacement of 40 is
better: p99 TTFT of such a run was 0.49 of that with 10. For the most requests within their SLOs: externality 2,
ownBatchShare 1, queueExternality 0, arrivalExternality 0, displacement 55, decodeWeight 1.3
([comparison](routing-quality.md)).

";

/// The text of the page, Markdown.
#[must_use]
pub fn reference_page() -> String {
    let mut page = format!("{HEAD}\n{}{COST}", reference_markdown());
    // Writing to a String cannot fail.
    let _ = writeln!(page, "## Types that are not plugins here\n\n| type | what it configures |\n|---|---|");
    for row in FOREIGN {
        if let ItemSupport::Implemented(what) = row.support {
            let _ = writeln!(page, "| `{}` | {what} |", row.name);
        }
    }
    let _ = writeln!(page, "\n## Types of llm-d-router without effect here\n\n| types | why |\n|---|---|");
    let no_effect =
        FOREIGN.iter().filter_map(|row| if let ItemSupport::NoEffect(why) = row.support { Some((row.name, why.to_owned())) } else { None });
    page.push_str(&rows_by_reason(no_effect));
    let _ = writeln!(page, "\n## Types of llm-d-router that are refused");
    let refusal = |row: &ReferencePlugin| if let ItemSupport::Refused(why, instead) = row.support { Some((why, instead)) } else { None };
    let mut reasons: Vec<&str> = FOREIGN.iter().filter_map(|row| refusal(row).map(|(why, _)| why)).collect();
    reasons.dedup(); // `FOREIGN` keeps the types with one reason together
    for reason in reasons {
        let _ = writeln!(page, "\nReason: {reason}.\n\n| types | instead |\n|---|---|");
        let types = FOREIGN.iter().filter_map(|row| {
            let (why, instead) = refusal(row)?;
            (why == reason).then(|| (row.name, instead.to_owned()))
        });
        page.push_str(&rows_by_reason(types));
    }
    let _ = writeln!(page, "\n## Feature gates, when on\n\n| gate | result |\n|---|---|");
    for (name, fate) in FEATURE_GATES {
        let _ = match fate {
            ItemSupport::Implemented(what) | ItemSupport::FlowControl(what) => writeln!(page, "| `{name}` | {what} |"),
            ItemSupport::NoEffect(why) => writeln!(page, "| `{name}` | no effect: {why} |"),
            ItemSupport::Refused(why, instead) => writeln!(page, "| `{name}` | refused: {why}; instead: {instead} |"),
        };
    }
    page
}

/// Table rows, one for each reason, with the names that share it.
fn rows_by_reason<'a>(types: impl Iterator<Item = (&'a str, String)>) -> String {
    let mut reasons: Vec<(String, Vec<String>)> = Vec::new();
    for (name, reason) in types {
        let name = format!("`{name}`");
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(name),
            None => reasons.push((reason, vec![name])),
        }
    }
    reasons.iter().map(|(reason, names)| format!("| {} | {reason} |\n", names.join(", "))).collect()
}
