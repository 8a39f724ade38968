// A table that scrolls by itself where the page is too narrow for it.

import type { ComponentChildren } from "preact";

/** `titles` are those of the columns; the children are the rows. */
export function Table({ label, titles, children, look }: { label: string; titles: string[]; children: ComponentChildren; look?: string }) {
  return (
    <Scrolled label={label}>
      <table class={look}>
        <thead>
          <tr>
            {titles.map((title) => (
              <th key={title} scope="col">
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </Scrolled>
  );
}

/** A part of the page that a keyboard can scroll. */
export function Scrolled({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <div class="scroll" role="region" aria-label={label} tabIndex={0}>
      {children}
    </div>
  );
}
