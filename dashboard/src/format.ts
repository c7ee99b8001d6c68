// Numbers and durations, short and aligned.

/** Four significant digits, without an exponent where none is needed; `–` for what was not recorded. */
export function num(value: unknown, digits = 4): string {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e7 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2));
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  return String(Number(value.toPrecision(digits)));
}

/** `2 h 03 min`, `3 min 20 s`, `4.21 s`, `12.0 ms`. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.abs(seconds);
  const sign = seconds < 0 ? "-" : "";
  const two = (n: number) => String(Math.floor(n)).padStart(2, "0");
  if (s >= 86400) return `${sign}${Math.floor(s / 86400)} d ${two((s % 86400) / 3600)} h`;
  if (s >= 3600) return `${sign}${Math.floor(s / 3600)} h ${two((s % 3600) / 60)} min`;
  if (s >= 60) return `${sign}${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s >= 1) return `${sign}${s.toFixed(2)} s`;
  if (s >= 1e-3) return `${sign}${(s * 1e3).toFixed(1)} ms`;
  if (s === 0) return "0 s";
  return `${sign}${(s * 1e6).toFixed(0)} µs`;
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let size = value;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(unit ? 1 : 0)} ${units[unit]}`;
}

/** By what a metric's or column's name says of its unit. */
export function byName(name: string, value: unknown): string {
  if (typeof value !== "number") return num(value);
  if (name.endsWith("_bytes") || name.endsWith("/bytes") || name === "bytes") return bytes(value);
  if (name.endsWith("_s")) return duration(value);
  return num(value);
}

export function ago(epochS: number | null): string {
  if (epochS === null) return "–";
  const s = Date.now() / 1000 - epochS;
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return `${Math.floor(s / 86400)} d ago`;
}

/** A value of a configuration or of JSON as one line. */
export function plain(value: unknown): string {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
