//! The text of the page.

pub(super) const HEAD: &str = "\
# Routing quality

The simulator prints this page; do not edit it. `make sim` runs the main table, `make sim-full` runs everything and
prints the page again. No figure here comes from a real cluster. A figure in bold is one where Switchpoint's default is
worse by more than 3 %.

`ours` is the default policy: one scorer, `marginal-cost-scorer` ([formula](plugins.md#the-cost-of-marginal-cost-scorer)).
It sends a request where it costs least, counting its own time and the delay of other requests. Its inputs are the
in-flight ledger, the prefix index, step times learned online and, where engines report it, KV memory in use. Without a
configuration file it applies, and this says the same:

```yaml
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: marginal-cost-scorer
```

`ours-goodput` aims at the most requests within their SLOs instead of the lowest latency:

```yaml
plugins:
- type: marginal-cost-scorer
  parameters: {externality: 2, ownBatchShare: 1, queueExternality: 0, arrivalExternality: 0, decodeWeight: 1.3}
```

![Mean TTFT by workload and policy](routing-quality/ttft.svg)
![p99 TTFT by workload and policy](routing-quality/ttft-p99.svg)
![Mean end-to-end time by workload and policy](routing-quality/e2e.svg)

## Method

- The scheduler, its plugins, the ledger, the prefix index and the step learner are the real code, in virtual time.
  Rivals are configurations of the same plugins. Where no plugin exists (LMetric, Dynamo's cost, bounded-load consistent
  hashing, least request, two choices, round robin, the oracle) they are small policies with the same ledger and index.
- Engines: continuous batching, first come first served, chunked prefill (8,192 tokens per step), at most 256 sequences,
  paged KV memory with a reference-counted LRU prefix cache, preemption by recompute. A step takes
  1 ms + decode(B, K) + max(0, prefill(n | context) - weights). The constants fit measured kernels: Llama-3.1-8B on H100
  6.07 + 0.00745 B + 4.31e-5 K and 2.6 + 0.0168 n + 5.46e-7 n^2 ms, 421,008 KV tokens; Qwen3-32B on H200
  18.17 + 0.0248 B + 5.81e-5 K and 3.5 + 0.0807 n + 4.22e-7 n^2 ms. A request takes 7 ms to reach the engine.
- Proxies know prompt lengths but not output lengths. They hash prompts in blocks of 64 tokens (beyond the 128th every
  fourth) and correct the index by the cached tokens that replies report. The step model starts from priors that are
  two to three times off.
- Workloads: Mooncake's conversation trace (its 3 s clock jittered) and synthetic trace, Azure's code (6 copies) and
  conversation (2 copies) traces of 2023, and 150 tenants with long system prompts. A seed rotates the trace, jitters,
  and breaks ties. Loads are shares of the highest rate that any policy sustains. The first tenth of the arrivals does
  not count; a run ends when all requests are served.
- In SLO: TTFT within 2 s, or within three times the cold prefill of that prompt on an idle engine if that is longer;
  and 50 ms per token (100 ms for Qwen).
- The main table has seeds 1 to 5; other tables name theirs. Intervals are 95 %, by Student's t over seeds. Seeds are
  rotations of the same traces, not samples of all traffic. Parameters were tuned on seeds 101 to 104 of the main
  workloads and of `light-load`; exceptions are stated.
";

/// The text that depends on no simulated run.
pub(super) const SCORER: &str = "\
| cost of the scorer at 100 endpoints in wasm: at most 5 µs | 3.2 µs (`scheduler/benches/both.py`) |
";

pub(super) const MAIN: &str = "\
Llama-3.1-8B on H100, loads LOADS. Below 1 ours is better. `2/2/3` are llm-d's queue, KV-cache and prefix
scorers with these weights; `2/2/3/2` adds its no-hit-lru scorer; `affinity+token-load` is what llm-d recommends since
August 2026.
`session-affinity` is llm-d's scorer with weight 3 instead of the prefix scorer; a prompt that begins with all of an
earlier prompt belongs to the same session. `2/2/3+active` is our former default.
";

/// The findings from single requests and from tuning.
pub(super) const LOSSES: &str = "
### Where it loses, and why

Each remedy that was tried costs more elsewhere ([what was tried](../history/routing-quality.md)).

- **Tenants, TTFT p99.** A question takes 60 ms if its system prompt is cached and 170 ms if not, so p99 depends on
  whether one in a hundred misses. The misses go to engines with fewer requests in flight, which pays off: replies have
  1,000 tokens.
- **Chat, TPOT p99.** At load 0.9 bursts give an engine more than the 256 sequences that it runs at once. Engines do not
  report that limit, so the scorer does not see which requests wait.
- **Prefix-heavy at load 0.9** exceeds what most policies sustain. What was cached one to two capacities ago is still
  there in 40 to 50 % of cases and counts half.
- **The goodput setting** trades mean latency for requests in SLO: end-to-end time 0.86 of the envelope, mean TTFT 1.08,
  and 1.9 times the best rival's p99 TTFT on conversation.
";

pub(super) const RATES: &str = "
### Highest rate with nine of ten requests in SLO, requests per second

Mean of the seeds, by bisection to 1 % of capacity. The oracle knows true caches, step times and output lengths, but is
greedy and ignores KV memory, so it is not a bound.

";

pub(super) const SETTINGS: &str = "
## Other settings

Nothing was tuned on these, with three exceptions, each on other seeds: the cost of evicting an adapter (`lora-zipf`,
101 to 104), the smaller delay on slow engines (`mixed-speeds`, 101 and 102), and the missing output at prefill stages
(`prefill-decode`). `make sim-full` keeps all runs, with their spread, in `target/bench`.
";

pub(super) const CHANGES: &str = "
## Engines that differ or change

`ours-told` knows the true step times of each engine at every moment; `ours` learns them. Ours relative to it is the
price of learning; above 1 learning costs something:

";

pub(super) const RECOVERY: &str = "
Recovery time: seconds of virtual time from the change until the mean TTFT of the requests of the next 20 s is at most
1.1 times that of the same requests and policy in a pool that had its final form from the start, and stays so for 30 s.
The figure is that of five seeds together; brackets give the shortest and longest of one seed, then follows the worst
20 s relative to that pool. `never` means not within the run. `one-restarts` counts from the moment the engine leaves, so
up to 30 s of it is its absence.

![Mean TTFT after an engine has become slow](routing-quality/one-slows-3x.svg)
![Mean TTFT after an engine has left](routing-quality/one-restarts.svg)
![Mean TTFT after two engines have joined](routing-quality/two-join.svg)
";

pub(super) const CLASSES: &str = "
### slo-classes

Three classes of requests on two engines that are three times as fast as two others, after a minute to learn: critical
(three of ten; TTFT 1.5 s, 45 ms per token, which the slow engines barely miss or meet), standard (four) and batch
(three; both 5 s and 150 ms). Share of each class in time, %, and shed. `default` is ours, which ignores SLOs; `slo`
uses predicted latency ([slo.md](../how-to/slo.md)); `weighed` is 2/2/3 plus requests in flight with weight 2; `turns`
is round robin.
";

pub(super) const VALIDATION: &str = "
## Against real engines

The simulated engine replays three runs of vLLM 0.19 (300 requests each at 10 per second, from LLMServingSim). Step
times are fitted to the even requests; figures are those of the odd ones. Both come from one run, so this validates the
structure of the engine, not its constants.

| run | measure | real, ms | simulated, ms | difference |
|---|---|---|---|---|
";

pub(super) const REAL: &str = "
## In real time, through Envoy

`make bench`, part `quality`: the conversation trace, three times as fast as recorded (0.7 of what eight engines
sustain), through Envoy, the filter and the daemon to eight simulated servers in real time. The last column is the
simulator's figure for the whole trace at that load.

";

pub(super) const LIMITS: &str = "
## What this does not show

Step times have no noise. There are no aborts, failures or priorities. An output is never the prefix of a later prompt,
since traces do not say which. Prompt tokens are known exactly; first tokens are seen at once. The second engine model
has the step times of the first.
";

/// How often the engine models agree.
pub(super) const AGREEMENT: &str = "
Of ALL pairs of these policies that differ by more than 3 % on our engines (mean TTFT, p99 TTFT and mean E2E of each
workload at load 0.7), SAME have the same order on these engines.
";

/// The description of a setting, in a sentence.
pub(super) fn setting(name: &str) -> &'static str {
    match name {
        "further-workloads" => {
            "Tenants with repeated questions; tenants of very different size; agents whose every turn repeats all earlier ones; \
             four assistants whose system prompts start all conversations; ServeGen's clients, with many short, bursty prompts."
        }
        "light-load" => "The four assistants without queues: their few prompts should spread over more than a few engines.",
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
        "one-restarts" => "After a third of the requests one engine leaves for 30 s and comes back with an empty cache.",
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
