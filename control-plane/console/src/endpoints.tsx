// Endpoints of a pool, live.

import { useMemo, useState } from "preact/hooks";
import type { Endpoint, Pool } from "./api";
import { UNKNOWN, age, figure, percent } from "./format";
import type { Rates } from "./rates";
import { Scrolled } from "./table";

// Rows shown at once: layout of a larger table takes longer than a frame.
const ROWS_MAX = 50;

interface Row {
  endpoint: Endpoint;
  picks: number | undefined;
  failures: number | undefined;
}

interface Column {
  title: string;
  help: string;
  value: (row: Row) => number | string | null | undefined;
  text: (row: Row) => string;
  bar?: (row: Row) => number | null;
}

const COLUMNS: Column[] = [
  { title: "State", help: "whether it may be picked", value: (r) => r.endpoint.state, text: (r) => r.endpoint.state },
  { title: "Picks/s", help: "decisions with this endpoint first, over 10 s", value: (r) => r.picks, text: (r) => figure(r.picks) },
  { title: "In flight", help: "requests that proxies have outstanding there", value: (r) => r.endpoint.in_flight, text: (r) => figure(r.endpoint.in_flight) },
  { title: "Queue", help: "requests that wait in the engine, as it reports", value: (r) => r.endpoint.queue_depth, text: (r) => figure(r.endpoint.queue_depth) },
  { title: "Running", help: "requests that run in the engine, as it reports", value: (r) => r.endpoint.running, text: (r) => figure(r.endpoint.running) },
  { title: "KV cache", help: "share of the KV cache in use, as the engine reports", value: (r) => r.endpoint.kv, text: (r) => percent(r.endpoint.kv), bar: (r) => r.endpoint.kv },
  { title: "Hit rate", help: "share of prompt tokens that the engine had cached, of finished requests whose usage says it", value: hitRate, text: (r) => percent(hitRate(r)), bar: hitRate },
  { title: "Prefill time", help: "learned, as a multiple of an average endpoint's; above 1 is slower", value: (r) => r.endpoint.prefill_time, text: (r) => times(r.endpoint.prefill_time) },
  { title: "Decode time", help: "learned, as a multiple of an average endpoint's; above 1 is slower", value: (r) => r.endpoint.decode_time, text: (r) => times(r.endpoint.decode_time) },
  { title: "Failed", help: "attempts refused or reset before a response, since the proxies started", value: (r) => r.endpoint.failed, text: failed },
];

function hitRate({ endpoint }: Row): number | null {
  return endpoint.prompt_tokens > 0 ? endpoint.cached_tokens / endpoint.prompt_tokens : null;
}

function times(value: number | null): string {
  return value === null ? UNKNOWN : `× ${value.toFixed(2)}`;
}

function failed({ endpoint, failures }: Row): string {
  return failures !== undefined && failures > 0 ? `${figure(endpoint.failed)} (${figure(failures)}/s)` : figure(endpoint.failed);
}

export function Endpoints({ pool, nowMs, rates }: { pool: Pool; nowMs: number; rates: Rates }) {
  const [text, setText] = useState("");
  const [sort, setSort] = useState<{ column: number; descending: boolean } | undefined>(undefined);
  const [page, setPage] = useState(0);
  const rows = pool.endpoints.map((endpoint) => ({
    endpoint,
    picks: rates.picked(pool.name, endpoint.name, endpoint.address),
    failures: rates.failed(pool.name, endpoint.name, endpoint.address),
  }));
  const found = order(rows.filter(({ endpoint }) => matches(endpoint, text)), sort);
  const pages = Math.max(1, Math.ceil(found.length / ROWS_MAX));
  const at = Math.min(page, pages - 1);
  const shown = found.slice(at * ROWS_MAX, (at + 1) * ROWS_MAX);
  return (
    <>
      <h2>Endpoints of {pool.name}</h2>
      <Problems pool={pool} />
      <Tiles pool={pool} rows={rows} />
      <p class="tools">
        <label>
          Find <input type="search" value={text} onInput={(event) => setText(event.currentTarget.value)} placeholder="name, address or state" />
        </label>
        <span aria-live="polite">
          {found.length === rows.length ? `${rows.length} endpoints` : `${found.length} of ${rows.length} endpoints`}
        </span>
        {pages > 1 && (
          <span class="pages">
            <button type="button" disabled={at === 0} onClick={() => setPage(at - 1)}>
              Previous
            </button>{" "}
            page {at + 1} of {pages}{" "}
            <button type="button" disabled={at === pages - 1} onClick={() => setPage(at + 1)}>
              Next
            </button>
          </span>
        )}
      </p>
      <Scrolled label="Endpoints">
        <table>
          <thead>
            <tr>
              <th scope="col">Endpoint</th>
              {COLUMNS.map(({ title, help }, column) => {
                const sorted = sort?.column === column ? (sort.descending ? "descending" : "ascending") : undefined;
                return (
                  <th key={title} scope="col" aria-sort={sorted}>
                    <button type="button" title={help} onClick={() => setSort({ column, descending: sorted !== "descending" })}>
                      {title}
                      <span aria-hidden="true">{sorted === undefined ? "" : sorted === "descending" ? " ↓" : " ↑"}</span>
                    </button>
                  </th>
                );
              })}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <EndpointRow key={`${row.endpoint.name} ${row.endpoint.address}`} row={row} nowMs={nowMs} />
            ))}
          </tbody>
        </table>
      </Scrolled>
      <p class="note">
        A proxy avoids an endpoint that failed for up to 5 s. Proxies do not report this to the daemon, so it is not shown here; failures are.
        A dash is unknown.
      </p>
    </>
  );
}

function EndpointRow({ row, nowMs }: { row: Row; nowMs: number }) {
  const { name, address, state, reason, since_ms } = row.endpoint;
  const why = reason === "" ? "" : `${reason}, for ${age(nowMs - since_ms)}`;
  const cells = COLUMNS.map(({ title, text, bar }) => ({ title, text: text(row), share: bar?.(row) ?? null }));
  // Most rows of a large pool have not changed; the same elements cost nothing.
  return useMemo(
    () => (
      <tr>
        <th scope="row">
          {name}
          {name !== address && <span class="minor"> {address}</span>}
          {why !== "" && <span class="reason">{why}</span>}
        </th>
        {cells.map(({ title, text, share }, at) => (
          <td key={title} class={at === 0 ? `state ${why === "" ? state : "doubtful"}` : undefined}>
            {text}
            {share !== null && (
              <span class="bar" aria-hidden="true">
                <span style={{ width: `${Math.min(100, 100 * share)}%` }} />
              </span>
            )}
          </td>
        ))}
      </tr>
    ),
    [name, address, state, why, JSON.stringify(cells)],
  );
}

function Tiles({ pool, rows }: { pool: Pool; rows: Row[] }) {
  const sum = (of: (row: Row) => number) => rows.reduce((total, row) => total + of(row), 0);
  const ready = rows.filter(({ endpoint }) => endpoint.state === "ready").length;
  const measured = rows.some(({ picks }) => picks !== undefined);
  const tiles: [string, string][] = [
    ["Ready", `${ready} of ${rows.length}`],
    ["Picks/s", measured ? figure(sum(({ picks }) => picks ?? 0)) : UNKNOWN],
    ["In flight", figure(sum(({ endpoint }) => endpoint.in_flight))],
    ["Prompts waiting", figure(sum(({ endpoint }) => endpoint.waiting_prompts))],
    ["Hit rate", percent(sum(({ endpoint }) => endpoint.cached_tokens), sum(({ endpoint }) => endpoint.prompt_tokens))],
    ["Workers reporting", figure(pool.vms)],
  ];
  return (
    <dl class="tiles">
      {tiles.map(([title, text]) => (
        <div key={title}>
          <dt>{title}</dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}

// What keeps the pool from being current.
function Problems({ pool }: { pool: Pool }) {
  const problems = [
    pool.complete ? null : "no complete set of endpoints yet: proxies do not get this pool",
    pool.discovery_error,
    pool.config_error,
    pool.objects_error,
  ].filter((problem) => problem !== null);
  if (problems.length === 0) return null;
  return (
    <ul class="alert">
      {problems.map((problem) => (
        <li key={problem}>{problem}</li>
      ))}
    </ul>
  );
}

function matches({ name, address, state, reason }: Endpoint, text: string): boolean {
  return text === "" || [name, address, state, reason].some((value) => value.toLowerCase().includes(text.toLowerCase()));
}

// Unknown values come last.
function order(rows: Row[], sort: { column: number; descending: boolean } | undefined): Row[] {
  const column = sort === undefined ? undefined : COLUMNS[sort.column];
  if (sort === undefined || column === undefined) return rows;
  const sign = sort.descending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || x === undefined) return y === null || y === undefined ? 0 : 1;
    if (y === null || y === undefined) return -1;
    return sign * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  });
}
