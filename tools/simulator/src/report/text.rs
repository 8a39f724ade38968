//! The text of the page.

pub(super) const HEAD: &str = "\
# Routing quality

The simulator prints this page; do not edit it. `make sim` runs the main table, `make sim-full` everything. No figure
comes from a real cluster. In bold: Switchpoint's default is worse by more than 3 %.

`ours` is the default policy ([formula](plugins.md#the-cost-of-marginal-cost-scorer)), as without a configuration file:

```yaml
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: marginal-cost-scorer
```

`ours-goodput` aims at the most requests within their SLOs:

```yaml
plugins:
- type: marginal-cost-scorer
  parameters: {ttftWeight: 2, queueExternality: 0}
```

![Mean TTFT by workload and policy](routing-quality/ttft.svg)
![p99 TTFT by workload and policy](routing-quality/ttft-p99.svg)
![Mean end-to-end time by workload and policy](routing-quality/e2e.svg)

## Method

- Scheduler, plugins, ledger, prefix index and step learner are the real code, in virtual time. Rivals are
  configurations of these plugins, or small policies with the same ledger and index: LMetric, Dynamo's cost,
  bounded-load consistent hashing (`chwbl`), least request, two choices (`p2c`), round robin, the oracle.
- Engines: continuous batching, first come first served, chunked prefill (8,192 tokens per step), at most 256 sequences,
  paged KV memory with a reference-counted LRU prefix cache, preemption by recompute. A step takes 1 ms + decode(B, K) +
  max(0, prefill(n | context) - weights). Constants fit measured kernels: Llama-3.1-8B on H100 6.07 + 0.00745 B +
  4.31e-5 K and 2.6 + 0.0168 n + 5.46e-7 n^2 ms, 421,008 KV tokens; Qwen3-32B on H200 18.17 + 0.0248 B + 5.81e-5 K and
  3.5 + 0.0807 n + 4.22e-7 n^2 ms. A request takes 7 ms to reach the engine.
- Proxies do not know output lengths. The step model starts from priors that are two to three times off.
- Workloads: Mooncake's conversation trace (its 3 s clock jittered) and synthetic trace, Azure's code (6 copies) and
  conversation (2 copies) traces of 2023, and 150 tenants with long system prompts. A seed rotates the trace, jitters
  and breaks ties. Loads are shares of the highest rate that any policy sustains. The first tenth of the arrivals does
  not count.
- In SLO: TTFT within 2 s, or within three times the cold prefill of that prompt on an idle engine if that is longer;
  and 50 ms per token (100 ms for Qwen).
- Seeds 1 to 5, unless stated. Intervals are 95 %, by Student's t over seeds, which are rotations of the same traces,
  not samples of all traffic. Parameters were tuned on seeds 101 to 104 of the main workloads and of `light-load`;
  exceptions are stated.
";

/// The text that depends on no simulated run.
pub(super) const SCORER: &str = "\
| cost of the scorer at 100 endpoints in wasm: at most 5 µs | 3.2 µs (`crates/scheduler/benches/both.py`) |
";

pub(super) const MAIN: &str = "\
Llama-3.1-8B on H100, loads LOADS. Below 1 ours is better. `2/2/3` are llm-d's queue, KV-cache and prefix
scorers with these weights; `2/2/3/2` adds no-hit-lru; `affinity+token-load` is llm-d's recommendation since August
2026; `session-affinity` is llm-d's scorer with weight 3 instead of the prefix scorer, where a prompt that begins with
all of an earlier one belongs to its session; `2/2/3+active` is our former default.
";

/// The findings from single requests and from tuning.
pub(super) const LOSSES: &str = "
### Where it loses, and why

Each remedy that was tried costs more elsewhere ([history](../history/routing-quality.md)).

- **Tenants, TTFT p99.** A question takes 60 ms if its system prompt is cached, otherwise 170 ms, so p99 depends on
  whether one in a hundred misses. Misses go to engines with fewer requests in flight, which pays off.
- **Chat, TPOT p99.** At load 0.9 bursts exceed the 256 sequences that an engine runs at once. Engines do not report
  that limit.
- **Prefix-heavy at load 0.9** exceeds what most policies sustain.
- **The goodput setting** trades mean latency for requests in SLO: end-to-end time 0.86 of the envelope, mean TTFT 1.08,
  p99 TTFT on conversation 1.9 times the best rival's.
";

pub(super) const RATES: &str = "
### Highest rate with nine of ten requests in SLO, requests per second

By bisection to 1 % of capacity. The oracle knows true caches, step times and output lengths, but is greedy and ignores
KV memory, so it is not a bound.

";

pub(super) const SETTINGS: &str = "
## Other settings

Each cell is mean TTFT, ms (p99 TTFT, ms; mean E2E, s); losses are cells more than 3 % worse than the best rival's.
`make sim-full` keeps all runs, with their spread, in `target/bench`. Tuned on these, with other seeds: the cost of
evicting an adapter (`lora-zipf`, 101 to 104), the smaller delay on slow engines (`mixed-speeds`, 101 and 102), and the
missing output at prefill stages (`prefill-decode`).
";

pub(super) const CHANGES: &str = "
## Engines that differ or change

`ours-told` knows the true step times of each engine at every moment; `ours` learns them. Ours relative to it:

";

pub(super) const RECOVERY: &str = "
Recovery time: seconds from the change until the mean TTFT of the next 20 s is at most 1.1 times that of the same
requests and policy in a pool that had its final form from the start, and stays so for 30 s. Five seeds together
[shortest, longest of one seed], then the worst 20 s relative to that pool. `never`: not within the run. `one-restarts`
counts from the moment the engine leaves, so up to 30 s of it is its absence.

![Mean TTFT after an engine has become slow](routing-quality/one-slows-3x.svg)
![Mean TTFT after an engine has left](routing-quality/one-restarts.svg)
![Mean TTFT after two engines have joined](routing-quality/two-join.svg)
";

pub(super) const CLASSES: &str = "
### slo-classes

Three classes of requests on two engines that are three times as fast as two others, after a minute to learn: critical
(three of ten; TTFT 1.5 s, 45 ms per token, which the slow engines barely miss or meet), standard (four) and batch
(three; both 5 s and 150 ms). Share in time, %, and shed. `default` is ours, which ignores SLOs; `slo` uses [predicted
latency](../how-to/slo.md); `weighed` is 2/2/3 plus requests in flight with weight 2; `turns` is round robin.
";

pub(super) const VALIDATION: &str = "
## Against real engines

The simulated engine replays three runs of vLLM 0.19 (300 requests each at 10 per second, from LLMServingSim). Step
times are fitted to the even requests, figures are of the odd ones. This validates the engine's structure, not its
constants.

| run | measure | real, ms | simulated, ms | difference |
|---|---|---|---|---|
";

pub(super) const REAL: &str = "
## In real time, through Envoy

`make bench`, part `quality`: the conversation trace, three times as fast as recorded (0.7 of what eight engines
sustain), through Envoy, filter and daemon to eight simulated servers. The last column is the simulator's, for the whole
trace at that load.

";

pub(super) const LIMITS: &str = "
## What this does not show

Step times have no noise. There are no aborts, failures or priorities. An output is never the prefix of a later prompt.
Prompt tokens are known exactly; first tokens are seen at once.
";

/// How often the engine models agree.
pub(super) const AGREEMENT: &str = "
Of ALL pairs of these policies that differ by more than 3 % on our engines (mean TTFT, p99 TTFT, mean E2E; load 0.7),
SAME have the same order on these engines.
";

/// The description of a setting, in a sentence.
pub(super) fn setting(name: &str) -> &'static str {
    match name {
        "further-workloads" => {
            "Tenants with repeated questions; tenants of very different size; agents whose every turn repeats all earlier ones; \
             four assistants whose system prompts start all conversations; ServeGen's clients, with many short, bursty prompts."
        }
        "light-load" => {
            "The four assistants without queues: their few prompts should spread over more than a few engines."
        }
        "budget-2048" => "Steps of at most 2,048 tokens.",
        "mixed-speeds" => "Every other engine is half as fast; policies must find out.",
        "qwen3-32b-h200" => "Qwen3-32B on H200.",
        "4-proxies-private" => "Four proxies that share nothing.",
        "4-proxies-10ms" => "Four proxies that share ledgers and placements 10 ms late.",
        "4-proxies-100ms" => "Four proxies that share ledgers and placements 100 ms late.",
        "metrics-0ms" => "Current metrics.",
        "metrics-1s" => "Metrics up to 1 s old.",
        "metrics-2s" => "Metrics up to 2 s old.",
        "one-slows-3x" => "After a third of the requests one engine takes three times as long.",
        "one-restarts" => {
            "After a third of the requests one engine leaves for 30 s and comes back with an empty cache."
        }
        "lora-zipf" => {
            "64 LoRA adapters with Zipf-distributed use; eight slots per engine; loading one delays a step by 200 ms (our scorer \
             assumes 100). `2/2/3+lora` adds lora-affinity-scorer with weight 3."
        }
        "prefill-decode" => {
            "Four engines prefill, four decode. KV transfer takes 1 ms plus 2.6 µs per token. A prompt is prefilled at its decode \
             endpoint if at most 255 of its tokens are not cached there. `random` picks both at random."
        }
        "second-engine" => {
            "The main workloads on another engine model: vLLM's scheduler, KV memory and prefix cache of NVIDIA's \
             `aisimulate-core`, with our step times."
        }
        "two-join" => "Six engines; after a third of the requests two more.",
        _ => "",
    }
}
