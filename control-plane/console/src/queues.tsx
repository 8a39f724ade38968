// The requests that flow control holds, and why.

import type { Band, Pool } from "./api";
import { Chart } from "./chart";
import { UNKNOWN, duration, figure, words } from "./format";
import { Table } from "./table";
import { counts, useSamples } from "./traffic";

const BAND_TITLES = ["Priority", "Held", "Bytes", "Oldest waits", "Because", "Wait P50", "Wait P99", "Outcomes since the proxies started"];

export function Queues({ pool }: { pool: Pool }) {
  const { samples, spanMs } = useSamples(pool.name);
  const times = samples.map(({ at_ms }) => at_ms);
  return (
    <>
      <h2>Queues of {pool.name}</h2>
      {!pool.flow_control && <p>Flow control is off in the configuration in force, so no request is held.</p>}
      {pool.flow_control && pool.bands.length === 0 && <p>Flow control is on. No request has passed it yet.</p>}
      {pool.bands.length > 0 && <Bands bands={pool.bands} />}
      <div class="charts">
        <Chart times={times} spanMs={spanMs} title="Requests held" text={figure} series={[{ name: "held", values: samples.map(({ held }) => held) }]} />
      </div>
      <p class="note">
        A request is held while the endpoint picked for it has no room. Its endpoint is picked again when it is sent. Counts are those of all proxies,
        as their last reports say.
      </p>
    </>
  );
}

function Bands({ bands }: { bands: Band[] }) {
  return (
    <Table label="Bands" titles={BAND_TITLES}>
      {bands.map((band) => (
        <tr key={band.priority}>
          <th scope="row">{band.priority}</th>
          <td>{figure(band.held)}</td>
          <td>{figure(band.bytes)}</td>
          <td>{duration(band.oldest_ms)}</td>
          <td>{reason(band)}</td>
          <td>{duration(band.wait_ms?.p50)}</td>
          <td>{duration(band.wait_ms?.p99)}</td>
          <td>{counts(Object.fromEntries(Object.entries(band.outcomes).map(([name, count]) => [words(name), count])))}</td>
        </tr>
      ))}
    </Table>
  );
}

function reason(band: Band): string {
  if (band.held === 0) return UNKNOWN;
  return band.full === null ? "no endpoint can take it now" : `no room at ${band.full}`;
}
