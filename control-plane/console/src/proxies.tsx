// Proxies and the state that they have.

import type { Overview, Proxy, ProxyPool } from "./api";
import { UNKNOWN, age, duration, words } from "./format";
import { Table } from "./table";
import { counts } from "./traffic";

interface Row {
  proxy: Proxy;
  pool: ProxyPool | undefined;
}

const TITLES = [
  "Node",
  "Filter",
  "Connected",
  "Last report",
  "Pool",
  "Revision applied",
  "Applied",
  "State",
  "Endpoints withheld",
  "Process",
  "Address",
  "Certificate",
];

export function Proxies({ overview }: { overview: Overview }) {
  const rows = overview.proxies.flatMap((proxy): Row[] =>
    proxy.pools.length === 0 ? [{ proxy, pool: undefined }] : proxy.pools.map((pool) => ({ proxy, pool })),
  );
  return (
    <>
      <h2>Proxies</h2>
      {rows.length === 0 && <p>No proxy has a state stream open.</p>}
      {rows.length > 0 && (
        <Table label="Proxies" titles={TITLES}>
          {rows.map(({ proxy, pool }) => (
            <tr key={`${proxy.process_id} ${proxy.peer} ${pool?.pool ?? ""}`}>
              <th scope="row">{proxy.node_id}</th>
              <td>{proxy.release ?? UNKNOWN}</td>
              <td>{age(overview.now_ms - proxy.since_ms)}</td>
              <td>{ago(proxy.heard_ms, duration)}</td>
              <td>{pool?.pool ?? UNKNOWN}</td>
              <td>{pool?.acknowledged ?? UNKNOWN}</td>
              <td>{ago(pool?.age_ms ?? null, age)}</td>
              <td class={`state ${pool?.refused === null && isCurrent(pool) ? "ready" : "doubtful"}`}>{stateOf(pool)}</td>
              <td>{pool?.withheld ?? UNKNOWN}</td>
              <td>
                <code>{proxy.process_id}</code>
              </td>
              <td>{proxy.peer}</td>
              <td>{proxy.certificate ?? UNKNOWN}</td>
            </tr>
          ))}
        </Table>
      )}
      <h3>Refusals since the daemon started</h3>
      <p>{counts(Object.fromEntries(Object.entries(overview.refusals).map(([name, count]) => [words(name), count])))}</p>
      <p class="note">
        A proxy reports about once a second. It keeps the revision that it applied until there is a newer one, so an old revision is current if
        nothing has changed since. Metrics are sent at least every 250 ms while a stream is open.
      </p>
    </>
  );
}

function ago(ms: number | null, text: (ms: number) => string): string {
  return ms === null ? UNKNOWN : `${text(ms)} ago`;
}

function isCurrent(pool: ProxyPool): boolean {
  return pool.acknowledged !== null && pool.acknowledged === pool.revision;
}

function stateOf(pool: ProxyPool | undefined): string {
  if (pool === undefined) return "requests no pool";
  if (pool.refused !== null) return `refused: ${pool.refused}`;
  if (pool.acknowledged === null) return "has no state of this pool";
  if (isCurrent(pool)) return "current";
  return `behind: revision ${pool.revision ?? UNKNOWN} exists`;
}
