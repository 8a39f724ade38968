// Traffic and latency of the last hour.

import type { History, Pool, Sample } from "./api";
import { Chart } from "./chart";
import { usePolled } from "./client";
import { duration, figure, percent } from "./format";
import { Table } from "./table";

const MODEL_TITLES = ["Model", "Priority", "Requests", "Outstanding", "Errors by status", "Prompt tokens", "Hit rate", "Generated tokens"];

const HISTORY_MS = 5000;

// A new daemon has few samples; a shorter axis shows them better than a full hour.
const SPAN_MS_MIN = 600_000;

/** The samples of a pool, and the length of the time axis. */
export function useSamples(pool: string): { samples: Sample[]; spanMs: number; loading: boolean } {
  const { data } = usePolled<History>("history", HISTORY_MS);
  const samples = data?.pools.find(({ name }) => name === pool)?.samples ?? [];
  const full = (data?.interval_seconds ?? 1) * (data?.samples_max ?? 1) * 1000;
  const known = (samples[samples.length - 1]?.at_ms ?? 0) - (samples[0]?.at_ms ?? 0);
  const spanMs = Math.min(full, Math.max(SPAN_MS_MIN, known));
  return { samples, spanMs, loading: data === undefined };
}

export function Traffic({ pool }: { pool: Pool }) {
  const { samples, spanMs, loading } = useSamples(pool.name);
  const times = samples.map(({ at_ms }) => at_ms);
  const rate = (of: (sample: Sample) => number) => samples.map((sample) => of(sample) / sample.seconds);
  const [p50, p99] = ["p50", "p99"] as const;
  const times_of = (of: "ttft_ms" | "tpot_ms" | "duration_ms") => [
    { name: "P50", values: samples.map((sample) => sample[of]?.[p50] ?? null) },
    { name: "P99", values: samples.map((sample) => sample[of]?.[p99] ?? null) },
  ];
  const common = { times, spanMs };
  return (
    <>
      <h2>Traffic of {pool.name}, the last hour</h2>
      {samples.length === 0 && <p>{loading ? "Loading …" : "No sample yet: the daemon takes the first one 10 s after its start."}</p>}
      <div class="charts">
        <Chart
          {...common}
          title="Requests"
          text={(value) => figure(value, "/s")}
          series={[
            { name: "begun", values: rate(({ requests }) => requests) },
            { name: "4xx", values: rate(({ client_errors }) => client_errors) },
            { name: "5xx", values: rate(({ server_errors }) => server_errors) },
            { name: "refused by the picker", values: rate(({ refused }) => refused) },
          ]}
        />
        <Chart {...common} title="Requests outstanding" text={figure} series={[{ name: "outstanding", values: samples.map(({ running }) => running) }]} />
        <Chart {...common} title="Time to the first token" text={duration} series={times_of("ttft_ms")} />
        <Chart {...common} title="Time per further token" text={duration} series={times_of("tpot_ms")} />
        <Chart {...common} title="Time of a whole request" text={duration} series={times_of("duration_ms")} />
        <Chart
          {...common}
          title="Tokens"
          text={(value) => figure(value, "/s")}
          series={[
            { name: "of prompts", values: rate(({ prompt_tokens }) => prompt_tokens) },
            { name: "of these cached", values: rate(({ cached_tokens }) => cached_tokens) },
            { name: "generated", values: rate(({ output_tokens }) => output_tokens) },
          ]}
        />
        <Chart
          {...common}
          title="Hit rate"
          text={(value) => percent(value)}
          series={[{ name: "cached share of prompt tokens", values: samples.map((s) => (s.prompt_tokens > 0 ? s.cached_tokens / s.prompt_tokens : null)) }]}
        />
      </div>
      <p class="note">
        The daemon keeps this hour in memory, so it begins at its start. Quantiles are interpolated within the buckets of a histogram. Tokens are
        those in the usage that engines report.
      </p>
      <Models pool={pool} />
    </>
  );
}

function Models({ pool }: { pool: Pool }) {
  return (
    <>
      <h3>Models, since the proxies started</h3>
      <Table label="Models" titles={MODEL_TITLES}>
        {pool.models.map((model) => (
          <tr key={`${model.model} ${model.target} ${model.priority}`}>
            <th scope="row">{model.target === model.model || model.target === "" ? model.model : `${model.model} → ${model.target}`}</th>
            <td>{model.priority}</td>
            <td>{figure(model.requests)}</td>
            <td>{figure(model.running)}</td>
            <td>{counts(model.errors)}</td>
            <td>{figure(model.prompt_tokens)}</td>
            <td>{percent(model.cached_tokens, model.prompt_tokens)}</td>
            <td>{figure(model.output_tokens)}</td>
          </tr>
        ))}
      </Table>
      <h3>Requests that proxies refused, by reason</h3>
      <p>{counts(pool.dropped)}</p>
    </>
  );
}

/** Counts by name as one line. */
export function counts(of: Record<string, number>): string {
  const rows = Object.entries(of).filter(([, count]) => count > 0);
  return rows.length === 0 ? "none" : rows.map(([name, count]) => `${name}: ${figure(count)}`).join(", ");
}
