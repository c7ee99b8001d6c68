// Files for the user: tables as CSV, plots as PNG and SVG.

import { toast } from "./dom";

export function download(name: string, blob: Blob): void {
  const url = URL.createObjectURL(blob);
  const anchor = document.createElement("a");
  anchor.href = url;
  anchor.download = name.replace(/[^\w.-]+/g, "-");
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  toast(`Saved ${anchor.download}`);
}

/** A cell: quoted where needed; a text that a spreadsheet would take for a formula is kept a text. */
function cell(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  let text = typeof value === "object" ? JSON.stringify(value) : String(value);
  if (/^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csv(name: string, columns: string[], rows: unknown[][]): void {
  const lines = [columns, ...rows].map((row) => row.map(cell).join(","));
  download(`${name}.csv`, new Blob([lines.join("\r\n"), "\r\n"], { type: "text/csv" }));
}

export function png(name: string, canvas: HTMLCanvasElement): void {
  canvas.toBlob((blob) => blob && download(`${name}.png`, blob), "image/png");
}

export function svgFile(name: string, root: SVGElement): void {
  const text = new XMLSerializer().serializeToString(root);
  download(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
}
