// Lines over the last hour, as a picture and as a table.

import { UNKNOWN, clock } from "./format";
import { Table } from "./table";

export interface Series {
  name: string;
  values: (number | null)[];
}

const WIDTH = 600;
const HEIGHT = 140;
// Rows of the table: each stands for several samples of a full hour.
const TABLE_ROWS_MAX = 20;

interface ChartProps {
  title: string;
  times: number[];
  /** The length of the time axis, in ms. */
  spanMs: number;
  series: Series[];
  text: (value: number) => string;
}

export function Chart({ title, times, spanMs, series, text }: ChartProps) {
  const end = times[times.length - 1] ?? 0;
  const largest = Math.max(0, ...series.flatMap(({ values }) => values.map((value) => value ?? 0)));
  const top = largest > 0 ? largest : 1;
  const x = (at: number) => WIDTH * (1 - (end - at) / spanMs);
  const y = (value: number) => HEIGHT - (HEIGHT - 4) * (value / top);
  const latest = series.map(({ name, values }) => `${name} ${shown(values[values.length - 1], text)}`).join(", ");
  return (
    <figure class="chart">
      <figcaption>
        {title}
        <span class="legend">
          {series.map(({ name, values }, at) => (
            <span key={name}>
              <span class={`swatch line-${at}`} aria-hidden="true" /> {name} <b>{shown(values[values.length - 1], text)}</b>
            </span>
          ))}
        </span>
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={`${title}, now: ${latest}`}>
        {[0.5, 1].map((share) => (
          <line key={share} class="grid" x1="0" x2={WIDTH} y1={y(top * share)} y2={y(top * share)} />
        ))}
        {series.map(({ name, values }, at) => (
          <path key={name} class={`line line-${at}`} d={path(values, times, x, y)} />
        ))}
      </svg>
      <p class="axis" aria-hidden="true">
        <span>{times.length === 0 ? "" : clock(end - spanMs)}</span>
        <span>top: {text(top)}</span>
        <span>{times.length === 0 ? "" : clock(end)}</span>
      </p>
      <details>
        <summary>{title} as a table</summary>
        <Values title={title} times={times} series={series} text={text} />
      </details>
    </figure>
  );
}

function Values({ title, times, series, text }: Omit<ChartProps, "spanMs">) {
  const step = Math.max(1, Math.ceil(times.length / TABLE_ROWS_MAX));
  const rows = times.map((at, row) => ({ at, row })).filter(({ row }) => (times.length - 1 - row) % step === 0);
  return (
    <Table label={title} titles={["Time", ...series.map(({ name }) => name)]}>
      {rows.map(({ at, row }) => (
        <tr key={at}>
          <th scope="row">{clock(at)}</th>
          {series.map(({ name, values }) => (
            <td key={name}>{shown(values[row], text)}</td>
          ))}
        </tr>
      ))}
    </Table>
  );
}

function shown(value: number | null | undefined, text: (value: number) => string): string {
  return value === null || value === undefined ? UNKNOWN : text(value);
}

// A gap where a value is unknown.
function path(values: (number | null)[], times: number[], x: (at: number) => number, y: (value: number) => number): string {
  let pen = "M";
  let line = "";
  values.forEach((value, at) => {
    const time = times[at];
    if (value === null || time === undefined) {
      pen = "M";
      return;
    }
    line += `${pen}${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return line;
}
