// Sampled decisions, one of them opened, and the decision of a pasted request.

import { useState } from "preact/hooks";
import type { Decisions as Sampled, Explanation, Pool, Question, SampledDecision } from "./api";
import { explain, reason, usePolled } from "./client";
import { Explained } from "./explained";
import { age, figure, percent } from "./format";

const DECISIONS_MS = 3000;

interface Opened {
  title: string;
  question: Question;
  answer: Explanation | undefined;
  /** The answer without variations. */
  original: Explanation | undefined;
  error: string | undefined;
  busy: boolean;
}

/** The opened decision, and asking for it with another question. */
function useOpened() {
  const [opened, setOpened] = useState<Opened | undefined>(undefined);
  const ask = async (title: string, question: Question) => {
    const same = (last: Opened | undefined) => last?.question.decision === question.decision && last?.question.request === question.request;
    const isVaried = (question.without?.length ?? 0) > 0 || question.config !== undefined;
    setOpened((last) => ({
      title,
      question,
      answer: same(last) ? last?.answer : undefined,
      original: same(last) ? last?.original : undefined,
      error: undefined,
      busy: true,
    }));
    try {
      const answer = await explain(question);
      setOpened((last) => last && last.question === question ? { ...last, answer, original: isVaried ? last.original : answer, busy: false } : last);
    } catch (error) {
      setOpened((last) => last && last.question === question ? { ...last, error: reason(error), busy: false } : last);
    }
  };
  return { opened, ask };
}

export function Decisions({ pool, nowMs }: { pool: Pool; nowMs: number }) {
  const { data } = usePolled<Sampled>("decisions", DECISIONS_MS);
  const { opened, ask } = useOpened();
  const rows = (data?.decisions ?? []).filter((decision) => decision.pool === pool.name);
  const vary = (question: Question) => opened !== undefined && void ask(opened.title, question);
  return (
    <>
      <h2>Decisions of {pool.name}</h2>
      {rows.length === 0 ? (
        <p>{data === undefined ? "Loading …" : "No decision yet. Each worker of a proxy samples one every 5 s, in pools of at most 256 endpoints."}</p>
      ) : (
        <List rows={rows} nowMs={nowMs} opened={opened?.question.decision} open={(decision) => void ask(titleOf(decision), { decision: decision.id })} />
      )}
      {opened !== undefined && (
        <section class="panel" aria-label="Explanation" aria-busy={opened.busy}>
          <h3>{opened.title}</h3>
          {opened.error !== undefined && (
            <p class="alert" role="alert">
              {opened.error}
            </p>
          )}
          {opened.answer !== undefined && <Explained answer={opened.answer} original={opened.original} question={opened.question} vary={vary} pool={pool} />}
        </section>
      )}
      <Ask pool={pool} ask={(question) => void ask("The pasted request", question)} />
      <p class="note">
        A sampled decision has its inputs: the endpoints with their load, metrics and cached blocks at that moment. It has no prompt and no hash of
        one. Configuration, labels, objects and learned models are those in force now.
      </p>
    </>
  );
}

function titleOf({ id, model }: SampledDecision): string {
  return `Decision ${id}, ${model}`;
}

interface ListProps {
  rows: SampledDecision[];
  nowMs: number;
  opened: number | undefined;
  open: (decision: SampledDecision) => void;
}

function List({ rows, nowMs, opened, open }: ListProps) {
  return (
    <div class="scroll short" role="region" aria-label="Sampled decisions" tabIndex={0}>
      <table>
        <thead>
          <tr>
            {["Decision", "Age", "Model", "Prompt tokens", "Cached at the best", "Picked", "Proxy"].map((title) => (
              <th key={title} scope="col">
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((decision) => (
            <tr key={decision.id} class={decision.id === opened ? "opened" : undefined}>
              <th scope="row">
                <button type="button" aria-pressed={decision.id === opened} onClick={() => open(decision)}>
                  Open {decision.id}
                </button>
              </th>
              <td>{age(nowMs - decision.at_ms)}</td>
              <td>{decision.model}</td>
              <td>{figure(decision.prompt_tokens)}</td>
              <td>{percent(decision.cached_tokens_max, decision.prompt_tokens)}</td>
              <td>{decision.picked[0] ?? "none"}</td>
              <td>{decision.source}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"];
const EXAMPLE = `{"model": "MODEL", "messages": [{"role": "user", "content": "hello"}]}`;

function Ask({ pool, ask }: { pool: Pool; ask: (question: Question) => void }) {
  const [path, setPath] = useState(PATHS[0] ?? "");
  const [request, setRequest] = useState("");
  const example = EXAMPLE.replace("MODEL", pool.models[0]?.model ?? "any");
  return (
    <form
      class="panel"
      onSubmit={(event) => {
        event.preventDefault();
        ask({ pool: pool.name, path, request });
      }}
    >
      <h3>Where would this request go?</h3>
      <p id="ask-help">
        The body of a request, or a decision record of an access log. The daemon decides it as its proxies do, and keeps nothing of it.
      </p>
      <label>
        Path{" "}
        <input value={path} list="paths" autocomplete="off" onInput={(event) => setPath(event.currentTarget.value)} />
      </label>
      <datalist id="paths">
        {PATHS.map((one) => (
          <option key={one} value={one} />
        ))}
      </datalist>
      <label class="block">
        Request
        <textarea
          rows={5}
          spellcheck={false}
          autocomplete="off"
          aria-describedby="ask-help"
          placeholder={example}
          value={request}
          onInput={(event) => setRequest(event.currentTarget.value)}
        />
      </label>
      <button type="submit" disabled={request.trim() === ""}>
        Explain
      </button>{" "}
      <button type="button" onClick={() => setRequest(example)}>
        Fill in an example
      </button>
    </form>
  );
}
