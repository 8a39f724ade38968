// The page: a bar with the pools and the parts, and the part that the address names.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { authorise, usePolled } from "./client";
import type { Overview } from "./api";
import { Decisions } from "./decisions";
import { Endpoints } from "./endpoints";
import { age } from "./format";
import { Proxies } from "./proxies";
import { Queues } from "./queues";
import { Rates } from "./rates";
import { Slo } from "./slo";
import { Traffic } from "./traffic";

const PARTS = ["endpoints", "traffic", "queues", "slo", "decisions", "proxies"] as const;
type Part = (typeof PARTS)[number];
const TITLES: Record<Part, string> = {
  endpoints: "Endpoints",
  traffic: "Traffic",
  queues: "Queues",
  slo: "SLO",
  decisions: "Decisions",
  proxies: "Proxies",
};
const OVERVIEW_MS = 2000;

interface Place {
  /** `undefined` if the address names no part. */
  part: Part | undefined;
  pool: string | undefined;
}

// `#/part/pool`, each of them optional.
function place(): Place {
  const [before, part, pool] = location.hash.split("/");
  const isBare = (before === "" || before === "#") && (part === undefined || part === "");
  const known = isBare ? "endpoints" : PARTS.find((name) => name === part);
  return { part: known, pool: pool === undefined || pool === "" ? undefined : decoded(pool) };
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function usePlace() {
  const [at, setAt] = useState(place);
  useEffect(() => {
    const changed = () => setAt(place());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return at;
}

const rates = new Rates();

function App() {
  const { part, pool: wanted } = usePlace();
  const overview = usePolled<Overview>("overview", OVERVIEW_MS, (next) => rates.add(next));
  useEffect(() => {
    document.title = `${part === undefined ? "No such page" : TITLES[part]} · Switchpoint`;
  }, [part]);
  const pools = overview.data?.pools ?? [];
  const pool = pools.find((one) => one.name === wanted) ?? pools[0];
  const link = (to: Part) => `#/${to}/${encodeURIComponent(pool?.name ?? "")}`;
  return (
    <>
      <header class="top">
        <h1>Switchpoint</h1>
        <nav aria-label="Parts">
          {PARTS.map((name) => (
            <a key={name} href={link(name)} aria-current={name === part ? "page" : undefined}>
              {TITLES[name]}
            </a>
          ))}
        </nav>
        {pools.length > 1 && pool !== undefined && (
          <label class="pool">
            Pool{" "}
            <select value={pool.name} onChange={(event) => (location.hash = `#/${part ?? PARTS[0]}/${encodeURIComponent(event.currentTarget.value)}`)}>
              {pools.map((one) => (
                <option key={one.name}>{one.name}</option>
              ))}
            </select>
          </label>
        )}
      </header>
      <main>
        {part === undefined && <NoSuchPage link={link} />}
        {overview.needsToken && <TokenForm refresh={overview.refresh} />}
        {overview.error !== undefined && (
          <p class="alert" role="alert">
            No answer from the daemon: {overview.error}. {overview.data !== undefined && "What follows is the last state received."}
          </p>
        )}
        {overview.data !== undefined && pool === undefined && <p>The daemon has no pool yet.</p>}
        {overview.data === undefined && overview.error === undefined && !overview.needsToken && <p>Loading …</p>}
        {part !== undefined && overview.data !== undefined && pool !== undefined && <Shown part={part} overview={overview.data} pool={pool} />}
      </main>
      {overview.data !== undefined && (
        <footer>
          switchpointd {overview.data.release} ({overview.data.commit}), started {age(overview.data.now_ms - overview.data.term)} ago.
          Figures of proxies are up to a second old.
        </footer>
      )}
    </>
  );
}

function NoSuchPage({ link }: { link: (to: Part) => string }) {
  return (
    <>
      <h2>No such page</h2>
      <p role="alert">This address names no page of the console. There are:</p>
      <ul>
        {PARTS.map((name) => (
          <li key={name}>
            <a href={link(name)}>{TITLES[name]}</a>
          </li>
        ))}
      </ul>
    </>
  );
}

function Shown({ part, overview, pool }: { part: Part; overview: Overview; pool: Overview["pools"][number] }) {
  switch (part) {
    case "endpoints":
      return <Endpoints pool={pool} nowMs={overview.now_ms} rates={rates} />;
    case "traffic":
      return <Traffic pool={pool} />;
    case "queues":
      return <Queues pool={pool} />;
    case "slo":
      return <Slo pool={pool} />;
    case "decisions":
      return <Decisions pool={pool} nowMs={overview.now_ms} />;
    case "proxies":
      return <Proxies overview={overview} />;
  }
}

// The token stays in the memory of this page.
function TokenForm({ refresh }: { refresh: () => void }) {
  const [token, setToken] = useState("");
  return (
    <form
      class="panel"
      onSubmit={(event) => {
        event.preventDefault();
        authorise(token);
        refresh();
      }}
    >
      <h2>Token</h2>
      <p id="token-help">This daemon was started with --admin-token-file. The token is not stored; a reload of the page forgets it.</p>
      <label>
        Token <input type="password" autocomplete="off" aria-describedby="token-help" value={token} onInput={(e) => setToken(e.currentTarget.value)} />
      </label>{" "}
      <button type="submit">Use it</button>
    </form>
  );
}

const root = document.getElementById("app");
if (root !== null) {
  root.replaceChildren();
  render(<App />, root);
}
