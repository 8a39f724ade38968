//! The words of the page.

pub(super) const HEAD: &str = "\
# Routing quality

Printed from simulated runs, do not edit: `make sim` runs the main table, `make sim-full` everything and prints this page again. No figure here
is of a real cluster. Losses stand beside gains: in bold where ours is worse by more than 3 %.

Ours is one scorer, `marginal-cost-scorer` ([plugins.md](plugins.md)): a request goes where it costs least, its own time and what it imposes on
those already there. It reads the in-flight ledger, the prefix index and step times learned online, and of what engines report how much of their KV
memory is in use; where they do not say, it goes without. It is what holds without a configuration, and this says the same:

```yaml
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: marginal-cost-scorer
```

For the most requests within their SLOs rather than the lowest latency, below `ours-goodput`:

```yaml
plugins:
- type: marginal-cost-scorer
  parameters: {externality: 2, ownBatchShare: 1, queueExternality: 0, arrivalExternality: 0, decodeWeight: 1.3}
```

![Mean TTFT by workload and policy](routing-quality/ttft.svg)
![p99 TTFT by workload and policy](routing-quality/ttft-p99.svg)
![Mean end-to-end time by workload and policy](routing-quality/e2e.svg)

## Method

- The scheduler, its plugins, the ledger, the prefix index and the step learner are the real code, driven in virtual time. Rivals are
  configurations of the same plugins, or, where there is no plugin (LMetric, Dynamo's cost, bounded-load consistent hashing, least request, two
  choices, round robin, the oracle), small policies that see the same ledger and the same index.
- Engines: continuous batching, first come first served, chunked prefill (8,192 tokens a step), at most 256 sequences, paged KV memory with a
  reference-counted LRU prefix cache, preemption by recompute. A step takes 1 ms + decode(B, K) + max(0, prefill(n | context) - weights), with
  constants fitted to measured kernels: Llama-3.1-8B on H100 6.07 + 0.00745 B + 4.31e-5 K and 2.6 + 0.0168 n + 5.46e-7 n^2 ms, 421,008 KV
  tokens; Qwen3-32B on H200 18.17 + 0.0248 B + 5.81e-5 K and 3.5 + 0.0807 n + 4.22e-7 n^2 ms. 7 ms a request before the engine sees it.
- Proxies know prompt lengths, never output lengths. Prompts are hashed as in a proxy, in blocks of 64 tokens, every fourth beyond the 128th, and the
  index is corrected by what each reply tells was cached. The step model starts from priors two to three times off and is learned during the run.
- Workloads: Mooncake's conversation trace (its 3 s clock jittered) and synthetic trace, Azure's code (6 copies) and conversation (2 copies)
  traces of 2023, and 150 tenants with long system prompts. A seed rotates the trace, jitters and breaks ties. Loads are shares of the highest
  rate that any policy sustains. The first tenth of the arrivals is not counted; runs end when all are served.
- In SLO: TTFT within 2 s, or three times the cold prefill of that prompt on an idle engine where that is more; and 50 ms a token (100 for Qwen).
- Five seeds, 1 to 5, in the main table, those named in the others; intervals are 95 % by Student's t over seeds. They are rotations of the same
  traces, not samples of all traffic. Parameters were tuned on seeds 101 to 104 of the main workloads and of
  `light-load`'s; what else was tuned on is said there.
";

/// Of no simulated run.
pub(super) const SCORER: &str = "\
| cost of the scorer at 100 endpoints in wasm: at most 5 µs | 3.2 µs (`scheduler/benches/both.py`) |
";

pub(super) const MAIN: &str = "\
Llama-3.1-8B on H100, loads LOADS. Below 1 ours is better. `2/2/3` are llm-d's queue, KV-cache and prefix scorers with these weights,
the last 2 of `2/2/3/2` is its no-hit-lru scorer; `affinity+token-load` is what llm-d has recommended since August 2026. `session-affinity` is its
scorer of that name with weight 3 in place of the prefix scorer: a prompt that begins with all of an earlier one is of the same session.
`2/2/3+active` was our own default before.
";

/// What looking at single requests and tuning found.
pub(super) const LOSSES: &str = "
### Why it loses where it loses

Looked at on the tuning seeds (figures below are of those, unless it says otherwise), and left as it is: what mends one costs another, here or elsewhere.

- **Tenants, TTFT p99.** A question takes 60 ms where its system prompt is cached and 170 ms where it is not, so p99 says whether more or fewer than one
  in a hundred finds nothing. Those that do not were sent to an engine with fewer requests in flight, which is worth it for them: replies have 1,000
  tokens. What a copy displaces (`displacement`) holds them near one in a hundred: without it p99 is 1.32 of the best rival's and mean E2E 0.993 of the
  envelope, with it 1.02 and 1.004. Nine of ten tenants have one copy; of those that have two the older is asked first (`refresh`), or it is gone when it
  is wanted: p99 was 1.04 without.
- **Few prompts that everybody asks for** are what displacement must not keep to a few engines, so it counts by how rarely a prefix is asked for, which the
  index knows: on a real Envoy 3.9 requests ran at an engine of `bench sharing`; charged all the same it were 5.8.
- **Conversation, TTFT p99**, was 1.07 of the best rival's, Dynamo's cost at load 0.9: that goes by tokens held, ours by steps and queues alone, and so sent
  long prompts where the queue was short and no KV memory free. One of 66,000 tokens waited 4.7 s there, with 4,500 tokens before it. Where engines tell how much of
  their memory is in use, what a prompt lacks now counts as waiting (`memoryWeight`): p99 1.02, mean TTFT 0.97 of the envelope for 1.01. It counts for no
  more than the prompt's own need. Charged with all that was short, prompts left the engines that held their prefix, copies took more memory still, and
  the mean TTFT of tenants at load 0.95 was 3.5 to 9 s in place of 0.1.
- **Chat, TPOT p99.** In the bursts of load 0.9 an engine is given more than the 256 sequences that it runs at once, and which ones wait is not seen: no
  engine reports that limit. Known, p99 there were 1.08 of the best rival's for 1.13 (of the simulated engines; real ones differ). At load 0.5 prompts follow one another where fewest tokens are.
- **What holds others up** is a matter of choice. With `ownBatchShare` 0 conversation's p99 is 1.00 of the best rival's, tenants' 0.99, and mean TTFT and E2E of
  all workloads 0.94 and 0.96 of the envelope, for 0.92 and 0.94 by default. With the goodput setting it is the other way round: E2E 0.86, mean TTFT
  1.08, and conversation's p99 1.9 times the best rival's. The default is between.
- **Code's highest rate** was 0.87 of the oracle's. What missed its SLO there were short replies, by one long prefill beside them; the former formula charged that
  only where steps were slow already. Charged in full, and queues for nothing but the time in them, the goodput setting is level with the oracle there. On chat it is
  3 % behind, where the default is 1 % ahead; its p99 TTFT there is three times the best rival's. Charging queues for more loses more, on chat as well (at
  load 0.85 to 0.9 a `queueExternality` of 0.1 costs 3 % of the requests in SLO).
- **Prefix-heavy at load 0.9** is beyond what most policies sustain. What is given one to two capacities ago is there for 40 to 50 % (on conversation), and counts half:
  its mean TTFT there is 0.87 of that by beliefs that end at one capacity, 0.72 were caches known exactly.
";

pub(super) const RATES: &str = "
### Highest rate with nine of ten requests in SLO, requests a second

Mean of the seeds, by bisection to 1 % of capacity. The oracle sees true caches, step times and output lengths, but is greedy, and does not look
at KV memory: no bound.

";

pub(super) const SETTINGS: &str = "
## Other settings

Never tuned on, but for three: what displacing an adapter counts for was on seeds 101 to 104 of `lora-zipf`; that others are held up by less on a slow
engine was found on seeds 101 and 102 of `mixed-speeds`, and that no output is to be expected where only prompts are worked through on those of `prefill-decode`.
";

pub(super) const CHANGES: &str = "
## Where engines differ or change

`ours-told` is ours with the true step times of each engine from the start, and from the moment they change, in place of what is learned online.
Ours against it, so what learning costs; above 1 it costs something:

";

pub(super) const RECOVERY: &str = "
How long until a policy is back: seconds of virtual time from the change until the mean TTFT of the requests of the next 20 s is at most 1.1 times
that of the same requests under the same policy in a pool that was like that from the start, and stays so for 30 s. Of five seeds together, in
brackets the shortest and longest of one, then the worst 20 s against that pool. `never`: not within the run, minutes after the change. It says how
fast a policy gets used to the change, not how well it then does. `one-restarts` counts from when the engine leaves, so up to 30 s of it is its absence.

![Mean TTFT after an engine has become slow](routing-quality/one-slows-3x.svg)
![Mean TTFT after an engine has left](routing-quality/one-restarts.svg)
![Mean TTFT after two engines have joined](routing-quality/two-join.svg)
";

pub(super) const CLASSES: &str = "
### slo-classes

Three classes of requests, on two engines that are three times as fast as two others, after a minute to learn: critical (three of ten; TTFT 1.5 s, 45 ms a token,
which the slow ones just miss or just meet), standard (four) and batch (three; both 5 s and 150 ms). Share of each in time, %, and shed. `default` is ours,
which knows of no SLO; `slo` is by predicted latency ([slo.md](../how-to/slo.md)); `weighed` is 2/2/3 with requests in flight weighed 2; `turns` is round robin.
";

pub(super) const VALIDATION: &str = "
## Against real engines

Three runs of vLLM 0.19 (300 requests each at 10 a second, from LLMServingSim) played through the simulated engine: step times fitted to the even
requests, figures of the odd ones. Both are of one run, so this speaks for the engine's structure, not for constants.

| run | measure | real, ms | simulated, ms | off by |
|---|---|---|---|---|
";

pub(super) const REAL: &str = "
## In real time, through Envoy

`make bench` part `quality`: the conversation trace, three times as fast as recorded (0.7 of what eight engines sustain), through Envoy, the filter
and the daemon to eight simulated servers that take real time. The last column is the simulator's, of the whole trace at that load.

";

pub(super) const LIMITS: &str = "
## What this does not show

Step times without noise; no aborts, failures and priorities; output is never a prefix of a later prompt, as traces do not say which; prompt tokens
are known exactly; first tokens are seen at once. The second engine model has the step times of the first.
";

/// How far the engine models agree.
pub(super) const AGREEMENT: &str = "
Of ALL pairs of these policies that are more than 3 % apart on our engines (mean TTFT, p99 TTFT and mean E2E of each workload at load 0.7), SAME are
in the same order on these.
";

/// What a setting is, in a sentence.
pub(super) fn setting(name: &str) -> &'static str {
    match name {
        "further-workloads" => {
            "Tenants with repeated questions, tenants of very different size, agents whose every turn carries all before it, four assistants \
             whose system prompts all conversations begin with, and ServeGen's clients: many short prompts, each client with bursts and lengths of its own."
        }
        "light-load" => {
            "The four assistants where nobody has to wait: what matters is that their few prompts are not kept to a few engines."
        }
        "budget-2048" => "Steps of at most 2,048 tokens.",
        "mixed-speeds" => "Every other engine is half as fast; nobody is told.",
        "qwen3-32b-h200" => "Qwen3-32B on H200.",
        "4-proxies-private" => "Four proxies that know nothing of one another.",
        "4-proxies-10ms" => "Four proxies that share ledgers and placements 10 ms late.",
        "4-proxies-100ms" => "Four proxies that share ledgers and placements 100 ms late.",
        "metrics-0ms" => "Metrics of the moment.",
        "metrics-1s" => "Metrics up to 1 s old.",
        "metrics-2s" => "Metrics up to 2 s old.",
        "one-slows-3x" => "After a third of the requests one engine takes three times as long.",
        "one-restarts" => "After a third of the requests one engine leaves for 30 s and comes back with an empty cache.",
        "lora-zipf" => {
            "64 LoRA adapters, much and little used by Zipf's law, eight places for them on each engine; loading one holds a step up for 200 ms, which \
             our scorer takes for 100. `2/2/3+lora` has lora-affinity-scorer with weight 3 besides."
        }
        "prefill-decode" => {
            "Four engines work through prompts, four decode. KV goes from one to the other in 1 ms and 2.6 µs a token. A prompt is worked through where \
             it is decoded if at most 255 of its tokens are not cached there. What steps cost is learned of those alone, as in a proxy. `random`: \
             both picks at random."
        }
        "second-engine" => {
            "The same by another's model of an engine: vLLM's scheduler, KV memory and prefix cache as NVIDIA's `aisimulate-core` has them, with our \
             step times."
        }
        "two-join" => "Six engines; after a third of the requests two more.",
        _ => "",
    }
}
