// Rates of endpoints, from the overviews of the last seconds.

import type { Overview } from "./api";

// Proxies report once a second, so a shorter window is unsteady.
const WINDOW_MS = 10_000;

interface Reading {
  atMs: number;
  counts: Map<string, { picked: number; failed: number }>;
}

/** The growth of the counters within the window. */
export class Rates {
  private readings: Reading[] = [];

  add(overview: Overview): void {
    const counts: Reading["counts"] = new Map();
    for (const pool of overview.pools) {
      for (const { name, address, picked, failed } of pool.endpoints) counts.set(key(pool.name, name, address), { picked, failed });
    }
    this.readings.push({ atMs: overview.now_ms, counts });
    while (this.readings.length > 2 && (this.readings[1]?.atMs ?? 0) <= overview.now_ms - WINDOW_MS) this.readings.shift();
  }

  /** Picks per second; undefined before there are two readings. */
  picked(pool: string, name: string, address: string): number | undefined {
    return this.rate(key(pool, name, address), "picked");
  }

  /** Failed attempts per second. */
  failed(pool: string, name: string, address: string): number | undefined {
    return this.rate(key(pool, name, address), "failed");
  }

  private rate(of: string, count: "picked" | "failed"): number | undefined {
    const [first, last] = [this.readings[0], this.readings[this.readings.length - 1]];
    const [before, now] = [first?.counts.get(of), last?.counts.get(of)];
    if (first === undefined || last === undefined || before === undefined || now === undefined || last.atMs <= first.atMs) return undefined;
    return Math.max(0, ((now[count] - before[count]) * 1000) / (last.atMs - first.atMs));
  }
}

function key(pool: string, name: string, address: string): string {
  return `${pool}\n${name}\n${address}`;
}
