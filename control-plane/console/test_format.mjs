// Numbers as the console prints them. `npm test` builds the module first.

import assert from "node:assert/strict";
import { test } from "node:test";
import { duration, figure, percent } from "./node_modules/.format.mjs";

test("figures have three digits and no exponent", () => {
  const table = [
    [null, "–"],
    [Number.NaN, "–"],
    [0, "0"],
    [7, "7"],
    [42, "42"],
    [0.000000123, "0.000000123"],
    [0.0123, "0.0123"],
    [1.234, "1.23"],
    [12.34, "12.3"],
    [99.44, "99.4"],
    [99.45, "99.5"],
    [99.94, "99.9"],
    [99.96, "100"],
    [99.99, "100"],
    [100.4, "100"],
    [1234.5, "1,235"],
    [12_345_678, "12,345,678"],
    [1e12, "1,000,000,000,000"],
    [-99.99, "-100"],
    [-0.5, "-0.5"],
  ];
  for (const [value, text] of table) assert.equal(figure(value), text);
  assert.equal(figure(99.97, "/s"), "100 /s");
});

test("durations have no exponent", () => {
  for (const [ms, text] of [[null, "–"], [0.25, "0.25 ms"], [99.6, "99.6 ms"], [99.99, "100 ms"], [999, "999 ms"], [1500, "1.5 s"], [99_990, "100 s"]]) {
    assert.equal(duration(ms), text);
  }
});

test("a share below the whole is never 100 %", () => {
  const table = [
    [null, 1, "–"],
    [1, 0, "–"],
    [0, 5, "0 %"],
    [1, 3, "33.3 %"],
    [1, 20_000, "0.005 %"],
    [0.5, 1, "50 %"],
    [99, 100, "99 %"],
    [996, 1000, "99.6 %"],
    [9945, 10_000, "99.5 %"],
    [9996, 10_000, "99.96 %"],
    [9999, 10_000, "99.99 %"],
    [99_999, 100_000, "99.999 %"],
    [999_999, 1_000_000, "99.9999 %"],
    [999_999_999, 1_000_000_000, "99.9999 %"],
    [1000, 1000, "100 %"],
    [1, 1, "100 %"],
    [3, 2, "150 %"],
  ];
  for (const [part, whole, text] of table) assert.equal(percent(part, whole), text, `${part} of ${whole}`);
});
