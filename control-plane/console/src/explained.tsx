// A decision with its reasons: each candidate's cost by term as a bar, and variations.

import { useState } from "preact/hooks";
import type { Candidate, Explanation, Pool, Question } from "./api";
import { configOf, reason } from "./client";
import { duration, figure, words } from "./format";
import { Table } from "./table";

// Candidates shown at once.
const CANDIDATES_MAX = 50;

interface ExplainedProps {
  answer: Explanation;
  original: Explanation | undefined;
  question: Question;
  vary: (question: Question) => void;
  pool: Pool;
}

export function Explained({ answer, original, question, vary, pool }: ExplainedProps) {
  const without = question.without ?? [];
  const leaveOut = (endpoint: string) => vary({ ...question, without: [...without, endpoint] });
  const takeBack = (endpoint: string) => vary({ ...question, without: without.filter((one) => one !== endpoint) });
  // A request that is answered before a decision has no candidates.
  const profiles = [{ name: answer.profile ?? "default", candidates: answer.candidates }, ...(answer.profiles ?? [])].filter(
    ({ candidates }) => candidates.length > 0,
  );
  const names = new Map(pool.endpoints.map(({ name, address }) => [address, name]));
  return (
    <>
      <Outcome answer={answer} original={original} names={names} />
      {without.length > 0 && (
        <p>
          Left out:{" "}
          {without.map((endpoint) => (
            <button key={endpoint} type="button" onClick={() => takeBack(endpoint)}>
              {named(endpoint, names)}: take back
            </button>
          ))}
        </p>
      )}
      {profiles.map(({ name, candidates }) => (
        <Candidates key={name} profile={name} candidates={candidates} picked={answer.picked} names={names} leaveOut={leaveOut} />
      ))}
      <Configuration key={question.decision ?? "request"} pool={pool.name} question={question} vary={vary} />
      {answer.note !== undefined && <p class="note">Note: {answer.note}.</p>}
    </>
  );
}

function named(address: string, names: Map<string, string>): string {
  const name = names.get(address);
  return name === undefined || name === address ? address : `${name} (${address})`;
}

function Outcome({ answer, original, names }: { answer: Explanation; original: Explanation | undefined; names: Map<string, string> }) {
  const list = (addresses: string[]) => addresses.map((address) => named(address, names)).join(", then ");
  const first = answer.picked[0];
  const before = original?.picked[0];
  const stages = [
    ["prefill", answer.prefill],
    ["encode", answer.encode],
    ["data parallel", answer.data_parallel],
  ] as const;
  return (
    <div aria-live="polite">
      <p>
        {first === undefined ? "No endpoint is picked" : <>Picked: <b>{list(answer.picked)}</b></>}
        {answer.refused !== undefined && `, refused: ${answer.refused}`}
        {answer.reply !== undefined && `, answered ${answer.reply.status}${message(answer.reply.body)}`}.
      </p>
      {answer.held !== undefined && (
        <p>
          Held by flow control at priority {answer.held.priority}
          {answer.held.full === null ? ", because no endpoint can take it now." : ` until ${named(answer.held.full, names)} has room. The endpoint is picked again then.`}
        </p>
      )}
      {original !== undefined && original !== answer && (
        <p>{first === before ? "The first choice stays the same." : `Without this change the first choice is ${before === undefined ? "none" : named(before, names)}.`}</p>
      )}
      {answer.was_picked !== undefined && <p>The proxy picked: {answer.was_picked.length === 0 ? "none" : list(answer.was_picked)}.</p>}
      {stages.map(([stage, addresses]) => addresses !== undefined && <p key={stage}>For {stage}: {list(addresses)}.</p>)}
    </div>
  );
}

function message(body: unknown): string {
  const text = (body as { error?: { message?: unknown } } | null)?.error?.message;
  return typeof text === "string" ? `, “${text}”` : "";
}

interface CandidatesProps {
  profile: string;
  candidates: Candidate[];
  picked: string[];
  names: Map<string, string>;
  leaveOut: (endpoint: string) => void;
}

function Candidates({ profile, candidates, picked, names, leaveOut }: CandidatesProps) {
  // Picked endpoints in the order in which they are tried, then the others by score.
  const rank = ({ endpoint }: Candidate) => (picked.includes(endpoint) ? picked.indexOf(endpoint) : picked.length);
  const sorted = [...candidates].sort((a, b) => rank(a) - rank(b) || (b.total ?? -1) - (a.total ?? -1));
  const shown = sorted.slice(0, CANDIDATES_MAX);
  const terms = [...new Set(candidates.flatMap(({ cost }) => Object.keys(cost ?? {})))];
  const scorers = [...new Set(candidates.flatMap(({ scores }) => Object.keys(scores)))];
  const largest = Math.max(1e-9, ...candidates.map(positive));
  const titles = ["Endpoint", "What if", ...(terms.length > 0 ? ["Cost by term"] : []), "Score", ...scorers, "Cached tokens"];
  return (
    <>
      <h4>
        Profile {profile}: {candidates.length} candidates
      </h4>
      <p class="note">
        Picked endpoints are first, in the order in which they are tried: the picker's first choice, then the one of its other choices that answered
        most recently, which need not be the second best. All others follow by score.
      </p>
      {terms.length > 0 && (
        <p class="legend">
          Cost, the lower the better:{" "}
          {terms.map((term, at) => (
            <span key={term}>
              <span class={`swatch term-${at}`} aria-hidden="true" /> {words(term)}
            </span>
          ))}
        </p>
      )}
      <Table label={`Candidates of profile ${profile}`} titles={titles} look="candidates">
        {shown.map((candidate) => {
          const { endpoint, dropped_by, cost, scores, total } = candidate;
          const rank = picked.indexOf(endpoint);
          return (
            <tr key={endpoint} class={rank === 0 ? "opened" : undefined}>
              <th scope="row">
                {named(endpoint, names)}
                {rank >= 0 && <span class="minor"> choice {rank + 1}</span>}
                {dropped_by !== null && <span class="reason">removed by {dropped_by}</span>}
              </th>
              <td>
                <button type="button" aria-label={`Leave out ${endpoint}`} onClick={() => leaveOut(endpoint)}>
                  leave out
                </button>
              </td>
              {terms.length > 0 && <td>{cost !== undefined && <Cost cost={cost} terms={terms} largest={largest} />}</td>}
              <td>{figure(total)}</td>
              {scorers.map((scorer) => (
                <td key={scorer}>{figure(scores[scorer])}</td>
              ))}
              <td>{figure(cached(candidate))}</td>
            </tr>
          );
        })}
      </Table>
      {sorted.length > shown.length && <p class="note">The first {shown.length} of {sorted.length} are shown.</p>}
    </>
  );
}

function positive({ cost }: Candidate): number {
  return Object.values(cost ?? {}).reduce((sum, ms) => sum + Math.max(0, ms), 0);
}

function cached({ predicted }: Candidate): number | null {
  const tokens = predicted?.["cached_tokens"];
  return typeof tokens === "number" ? tokens : null;
}

// Terms below zero lower the cost; they are in the text and have no length in the bar.
function Cost({ cost, terms, largest }: { cost: Record<string, number>; terms: string[]; largest: number }) {
  const sum = Object.values(cost).reduce((total, ms) => total + ms, 0);
  const parts = terms.map((term, at) => ({ term, at, ms: cost[term] ?? 0 })).filter(({ ms }) => ms !== 0);
  return (
    <>
      <span class="stack" aria-hidden="true">
        {parts.map(({ term, at, ms }) => (
          <span key={term} class={`term-${at}`} title={`${words(term)}: ${duration(ms)}`} style={{ width: `${(100 * Math.max(0, ms)) / largest}%` }} />
        ))}
      </span>
      <b>{duration(sum)}</b>
      <span class="minor"> {parts.map(({ term, ms }) => `${words(term)} ${duration(ms)}`).join(", ")}</span>
    </>
  );
}

function Configuration({ pool, question, vary }: { pool: string; question: Question; vary: (question: Question) => void }) {
  const [config, setConfig] = useState<string | undefined>(undefined);
  const [error, setError] = useState<string | undefined>(undefined);
  // Begins with the one in force, unless something was typed before it came.
  const fill = async () => {
    try {
      const text = await configOf(pool);
      setConfig((last) => last ?? text);
      setError(undefined);
    } catch (failed) {
      setError(reason(failed));
    }
  };
  const back = () => {
    const { config: _, ...rest } = question;
    vary(rest);
  };
  return (
    <details onToggle={(event) => event.currentTarget.open && config === undefined && void fill()}>
      <summary>What if the configuration were different?</summary>
      <p class="note">Edit the configuration in force. Nothing changes but this answer.</p>
      {error !== undefined && <p class="alert">The configuration in force is not known: {error}.</p>}
      <label class="block">
        EndpointPickerConfig
        <textarea rows={16} spellcheck={false} autocomplete="off" value={config ?? ""} onInput={(event) => setConfig(event.currentTarget.value)} />
      </label>
      <button type="button" disabled={(config ?? "").trim() === ""} onClick={() => config !== undefined && vary({ ...question, config })}>
        Decide with it
      </button>{" "}
      {question.config !== undefined && (
        <button type="button" onClick={back}>
          Back to the one in force
        </button>
      )}
    </details>
  );
}
