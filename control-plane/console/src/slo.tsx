// Which share of the requests with an SLO met it.

import type { Pool } from "./api";
import { Chart } from "./chart";
import { figure, percent } from "./format";
import { Table } from "./table";
import { useSamples } from "./traffic";

const TITLES = ["Model", "Priority", "Met", "Missed", "Shed", "Share met"];

export function Slo({ pool }: { pool: Pool }) {
  const { samples, spanMs } = useSamples(pool.name);
  const times = samples.map(({ at_ms }) => at_ms);
  const all = (sample: (typeof samples)[number]) => sample.slo_met + sample.slo_missed + sample.slo_shed;
  const share = samples.map((sample) => (all(sample) > 0 ? sample.slo_met / all(sample) : null));
  const rate = (of: "slo_met" | "slo_missed" | "slo_shed") => samples.map((sample) => sample[of] / sample.seconds);
  const tracked = pool.models.filter((model) => model.slo_met + model.slo_missed + model.slo_shed > 0);
  return (
    <>
      <h2>SLO attainment of {pool.name}</h2>
      <p>{prediction(pool)}</p>
      {tracked.length === 0 && <p>No request with an SLO has ended yet. A request has one if it carries the SLO headers and its profile tracks them.</p>}
      <div class="charts">
        <Chart times={times} spanMs={spanMs} title="Share that met its SLO" text={(value) => percent(value)} series={[{ name: "met", values: share }]} />
        <Chart
          times={times}
          spanMs={spanMs}
          title="Requests with an SLO"
          text={(value) => figure(value, "/s")}
          series={[
            { name: "met", values: rate("slo_met") },
            { name: "missed", values: rate("slo_missed") },
            { name: "shed", values: rate("slo_shed") },
          ]}
        />
      </div>
      {tracked.length > 0 && (
        <>
          <h3>By model</h3>
          <Table label="SLO by model" titles={TITLES}>
            {tracked.map((model) => (
              <tr key={`${model.model} ${model.target} ${model.priority}`}>
                <th scope="row">{model.model}</th>
                <td>{model.priority}</td>
                <td>{figure(model.slo_met)}</td>
                <td>{figure(model.slo_missed)}</td>
                <td>{figure(model.slo_shed)}</td>
                <td>{percent(model.slo_met, model.slo_met + model.slo_missed + model.slo_shed)}</td>
              </tr>
            ))}
          </Table>
        </>
      )}
    </>
  );
}

function prediction(pool: Pool): string {
  if (!pool.latency_prediction) return "Latency prediction is off (--latency-prediction), so SLOs do not change picks.";
  return pool.predicts ? "Latencies are predicted." : "Latency prediction is on, but there are too few finished requests for a model yet.";
}
