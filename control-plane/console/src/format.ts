// Numbers and times as text. An unknown value is a dash: it is neither zero nor full.

export const UNKNOWN = "–";

// Made once: `toLocaleString` with options makes one for each call, and a table of 50 rows has 500 numbers.
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SIGNIFICANT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

// The largest share below one that is shown, in percent, and its digits after the point.
const SHARE_MAX = 99.9999;
const SHARE_DIGITS_MAX = 4;

/** A number with three significant digits; from 100 on a whole number, grouped. Never an exponent. */
export function figure(value: number | null | undefined, unit = ""): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const text = Math.abs(value) >= 100 ? WHOLE.format(Math.round(value)) : SIGNIFICANT.format(value);
  return unit === "" ? text : `${text} ${unit}`;
}

/** A share as a percentage; `parts` of nothing are unknown. Less than the whole is never "100 %". */
export function percent(part: number | null | undefined, whole = 1): string {
  if (part === null || part === undefined || whole <= 0) return UNKNOWN;
  const share = (100 * part) / whole;
  if (share <= 99 || share >= 100) return figure(share, "%");
  // One digit of what is missing.
  const shown = Math.min(share, SHARE_MAX);
  const digits = Math.min(SHARE_DIGITS_MAX, Math.max(1, Math.ceil(-Math.log10(100 - shown))));
  return `${shown.toLocaleString("en", { maximumFractionDigits: digits })} %`;
}

/** Milliseconds in a readable unit. */
export function duration(ms: number | null | undefined): string {
  if (ms === null || ms === undefined) return UNKNOWN;
  return ms >= 1000 ? figure(ms / 1000, "s") : figure(ms, "ms");
}

/** The time that has passed, in its largest unit. */
export function age(ms: number): string {
  const units: [number, string][] = [
    [86_400_000, "d"],
    [3_600_000, "h"],
    [60_000, "min"],
  ];
  for (const [size, unit] of units) {
    if (ms >= size) return `${Math.floor(ms / size)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(ms / 1000))} s`;
}

/** The local time of day. */
export function clock(ms: number): string {
  return new Date(ms).toLocaleTimeString("en-GB");
}

/** The name of a cost term or a reason without underscores. */
export function words(name: string): string {
  return name.replace(/_ms$/, "").replaceAll("_", " ");
}
