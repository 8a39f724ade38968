// Requests to the daemon that served this page.

import { useEffect, useRef, useState } from "preact/hooks";
import type { Configs, Explanation, Failure, Question } from "./api";

// A hidden page asks this much less often.
const HIDDEN_FACTOR = 15;

let token = "";

/** Sends this token from now on. */
export function authorise(given: string): void {
  token = given.trim();
}

class NeedsToken extends Error {}

async function call<T>(route: string, body?: unknown): Promise<T> {
  const headers: Record<string, string> = {};
  if (token !== "") headers["authorization"] = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const init: RequestInit = { headers, cache: "no-store" };
  const reply = await fetch(`api/v1/${route}`, body === undefined ? init : { ...init, method: "POST", body: JSON.stringify(body) });
  if (reply.status === 401) throw new NeedsToken();
  const text = await reply.text();
  if (!reply.ok) throw new Error(failure(text) ?? `status ${reply.status}`);
  return JSON.parse(text) as T;
}

function failure(text: string): string | undefined {
  try {
    return (JSON.parse(text) as Partial<Failure>).error;
  } catch {
    return text.trim() === "" ? undefined : text.trim();
  }
}

/** Asks which endpoint a request or a sampled decision goes to. */
export function explain(question: Question): Promise<Explanation> {
  return call("explain", question);
}

/** Reads the text of the configuration that a pool has now. */
export async function configOf(pool: string): Promise<string> {
  const { pools } = await call<Configs>("configs");
  const found = pools.find(({ name }) => name === pool);
  if (found === undefined) throw new Error(`no pool ${pool}`);
  return found.text;
}

export interface Polled<T> {
  data: T | undefined;
  error: string | undefined;
  needsToken: boolean;
  refresh: () => void;
}

/** Reads a route again and again. The last answer stays while the daemon does not answer. */
export function usePolled<T>(route: string, everyMs: number, received?: (data: T) => void): Polled<T> {
  const [state, setState] = useState<Omit<Polled<T>, "refresh">>({ data: undefined, error: undefined, needsToken: false });
  const refresh = useRef(() => {});
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    let over = false;
    const poll = async () => {
      clearTimeout(timer);
      try {
        const data = await call<T>(route);
        if (over) return;
        received?.(data);
        setState({ data, error: undefined, needsToken: false });
      } catch (error) {
        if (over) return;
        const needsToken = error instanceof NeedsToken;
        setState((last) => ({ data: last.data, error: needsToken ? undefined : reason(error), needsToken }));
      }
      timer = setTimeout(poll, document.hidden ? everyMs * HIDDEN_FACTOR : everyMs);
    };
    const shown = () => {
      if (!document.hidden) void poll();
    };
    refresh.current = () => void poll();
    document.addEventListener("visibilitychange", shown);
    void poll();
    return () => {
      over = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    };
  }, [route, everyMs]);
  return { ...state, refresh: refresh.current };
}

/** The text of an error. */
export function reason(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
