// Numbers and times as text. An unknown value is a dash: it is neither zero nor full.

export const UNKNOWN = "–";

/** A number with three significant digits, grouped. */
export function figure(value: number | null | undefined, unit = ""): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const text = Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toPrecision(2);
  return unit === "" ? text : `${text} ${unit}`;
}

/** A share as a percentage; `parts` of nothing are unknown. */
export function percent(part: number | null | undefined, whole = 1): string {
  return part === null || part === undefined || whole <= 0 ? UNKNOWN : `${figure(Math.round((1000 * part) / whole) / 10)} %`;
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
