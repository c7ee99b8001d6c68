// Curves: uPlot with the theme's colours, smoothing that skips gaps, and export as PNG and SVG.

import uPlot from "uplot";
import { svg } from "./dom";
import { duration, num } from "./format";
import { png, svgFile } from "./save";

export interface Curve {
  label: string;
  colour: string;
  x: (number | null)[];
  y: (number | null)[];
}
export interface ChartOptions {
  title: string;
  axis: "step" | "time";
  log: boolean;
  smoothing: number;
  height: number;
  syncKey?: string;
  onPick?: (x: number) => void;
}

export const css = (name: string): string => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Colours of the theme for series, told apart also by people who see fewer. */
export function palette(): string[] {
  return Array.from({ length: 8 }, (_, i) => css(`--c${i}`));
}

/** An exponential mean without bias at the beginning; gaps stay gaps. `weight` in [0, 1). */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return values;
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

const ofAxis = (axis: "step" | "time", x: number) => (axis === "time" ? duration(x) : num(x));

/** Curves on one x axis: raw values (faint) below their smoothed ones. */
function table(curves: Curve[], options: ChartOptions): { data: uPlot.AlignedData; series: uPlot.Series[] } {
  const positive = (y: (number | null)[]) => (options.log ? y.map((v) => (v !== null && v > 0 ? v : null)) : y);
  const series: uPlot.Series[] = [{ label: options.axis }];
  const tables: uPlot.AlignedData[] = [];
  for (const curve of curves) {
    const pairs: [number, number | null][] = [];
    curve.x.forEach((x, i) => {
      const y = curve.y[i] ?? null;
      if (x !== null && y !== null) pairs.push([x, y]);
    });
    pairs.sort((a, b) => a[0] - b[0]);
    const x = pairs.map((p) => p[0]);
    const y = pairs.map((p) => p[1]);
    const points = { show: y.length <= 12 && options.smoothing === 0, size: 4 };
    if (options.smoothing > 0) {
      tables.push([x, positive(y)] as uPlot.AlignedData);
      series.push({ label: `${curve.label} (raw)`, stroke: `${curve.colour}55`, width: 1, points: { show: false }, spanGaps: true });
    }
    tables.push([x, positive(smooth(y, options.smoothing))] as uPlot.AlignedData);
    series.push({ label: curve.label, stroke: curve.colour, width: 1.6, points, spanGaps: true });
  }
  const data = tables.length ? uPlot.join(tables) : ([[]] as unknown as uPlot.AlignedData);
  return { data, series };
}

function tooltip(options: ChartOptions, hidden: (label: string) => boolean): uPlot.Plugin {
  const box = document.createElement("div");
  box.className = "tip";
  box.hidden = true;
  return {
    hooks: {
      init: (u) => {
        u.over.append(box);
        u.over.addEventListener("mouseleave", () => (box.hidden = true));
      },
      setCursor: (u) => {
        const index = u.cursor.idx;
        const x = index === null || index === undefined ? undefined : u.data[0][index];
        if (x === undefined || (u.cursor.left ?? -1) < 0 || !u.over.matches(":hover")) {
          box.hidden = true;
          return;
        }
        box.textContent = "";
        const head = document.createElement("div");
        head.className = "tip-head";
        head.textContent = `${options.axis === "time" ? "after " : "step "}${ofAxis(options.axis, x)}`;
        box.append(head);
        u.series.forEach((s, i) => {
          const label = String(s.label);
          if (i === 0 || hidden(label)) return;
          const value = nearest(u.data[i] as (number | null)[], index as number, u.data[0] as number[]);
          if (value === null) return;
          const line = document.createElement("div");
          const swatch = document.createElement("i");
          swatch.style.background = String(typeof s.stroke === "function" ? s.stroke(u, i) : s.stroke);
          const name = document.createElement("span");
          name.textContent = label;
          const amount = document.createElement("b");
          amount.textContent = num(value);
          line.append(swatch, name, amount);
          box.append(line);
        });
        box.hidden = box.childElementCount < 2;
        const left = u.cursor.left ?? 0;
        const right = left > u.over.clientWidth / 2;
        box.style.left = right ? "auto" : `${left + 12}px`;
        box.style.right = right ? `${u.over.clientWidth - left + 12}px` : "auto";
      },
    },
  };
}

/** The value at an index, or the closest recorded one within 2 % of the axis. */
function nearest(values: (number | null)[], index: number, x: number[]): number | null {
  if (values[index] !== null && values[index] !== undefined) return values[index];
  const at = x[index] as number;
  const reach = 0.02 * ((x[x.length - 1] as number) - (x[0] as number));
  for (let d = 1; d < 50; d += 1) {
    for (const i of [index - d, index + d]) {
      const value = values[i];
      if (value !== null && value !== undefined && Math.abs((x[i] as number) - at) <= reach) return value;
    }
  }
  return null;
}

export class Chart {
  private plot: uPlot | null = null;
  private readonly observer: ResizeObserver;

  constructor(
    private readonly host: HTMLElement,
    private curves: Curve[],
    private options: ChartOptions,
  ) {
    this.observer = new ResizeObserver(() => {
      if (this.plot && host.clientWidth) this.plot.setSize({ width: host.clientWidth, height: this.options.height });
      else if (!this.plot) this.draw();
    });
    this.observer.observe(host);
    this.draw();
  }

  set(curves: Curve[], options: ChartOptions): void {
    this.curves = curves;
    this.options = options;
    this.draw();
  }

  close(): void {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  private draw(): void {
    const width = this.host.clientWidth;
    if (!width) return;
    const zoom = this.plot?.scales.x;
    const full = this.plot?.data[0];
    const zoomed =
      zoom && full?.length && ((zoom.min ?? 0) > (full[0] as number) || (zoom.max ?? 0) < (full[full.length - 1] as number))
        ? { min: zoom.min as number, max: zoom.max as number }
        : null;
    this.plot?.destroy();
    const { data, series } = table(this.curves, this.options);
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const isTime = this.options.axis === "time";
    const raw = (label: string) => label.endsWith(" (raw)");
    this.plot = new uPlot(
      {
        width,
        height: this.options.height,
        legend: { show: false },
        cursor: {
          points: { size: 6 },
          drag: { x: true, y: false, uni: 20 },
          ...(this.options.syncKey ? { sync: { key: this.options.syncKey, setSeries: false } } : {}),
        },
        scales: { x: { time: false }, y: { distr: this.options.log ? 3 : 1 } },
        padding: [8, 8, 0, 0],
        axes: [
          { ...axis, size: 26, values: (_u, ticks) => ticks.map((t) => (isTime ? short(t) : Number.isInteger(t) ? num(t) : "")) },
          { ...axis, size: 52, values: (_u, ticks) => ticks.map((t) => (t === null ? "" : num(t, 3))) },
        ],
        series,
        plugins: [tooltip(this.options, raw)],
      },
      data,
      this.host,
    );
    if (zoomed) this.plot.setScale("x", zoomed);
    const canvas = this.plot.root.querySelector("canvas");
    canvas?.setAttribute("role", "img");
    canvas?.setAttribute("aria-label", this.description());
    const onPick = this.options.onPick;
    if (onPick) {
      this.plot.over.addEventListener("click", () => {
        const index = this.plot?.cursor.idx;
        const x = index === null || index === undefined ? undefined : this.plot?.data[0][index];
        if (x !== undefined) onPick(x);
      });
    }
  }

  private description(): string {
    const last = (c: Curve) => num(c.y.filter((v) => v !== null).at(-1) ?? null);
    return `${this.options.title}: ${this.curves.map((c) => `${c.label} ends at ${last(c)}`).join("; ") || "no values"}`;
  }

  savePng(): void {
    const source = this.plot?.root.querySelector("canvas");
    if (!source) return;
    const ratio = devicePixelRatio || 1;
    const top = (24 + 18 * Math.ceil(this.curves.length / 3)) * ratio;
    const canvas = document.createElement("canvas");
    canvas.width = source.width;
    canvas.height = source.height + top;
    const c = canvas.getContext("2d") as CanvasRenderingContext2D;
    c.fillStyle = css("--surface");
    c.fillRect(0, 0, canvas.width, canvas.height);
    c.drawImage(source, 0, top);
    c.scale(ratio, ratio);
    c.font = "600 13px system-ui, sans-serif";
    c.fillStyle = css("--text");
    c.fillText(this.options.title, 10, 18);
    c.font = "11px system-ui, sans-serif";
    this.curves.forEach((curve, i) => {
      const x = 10 + ((i % 3) * (source.width / ratio - 20)) / 3;
      const y = 36 + 18 * Math.floor(i / 3);
      c.fillStyle = curve.colour;
      c.fillRect(x, y - 8, 10, 8);
      c.fillStyle = css("--text");
      c.fillText(curve.label, x + 16, y, (source.width / ratio - 20) / 3 - 20);
    });
    png(this.options.title, canvas);
  }

  /** The plot drawn again as vectors, from what is shown of it now. */
  saveSvg(): void {
    const u = this.plot;
    if (!u) return;
    const [w, hgt, left, top] = [720, 360, 60, 48];
    const [x0, x1] = [u.scales.x?.min ?? 0, u.scales.x?.max ?? 1];
    const [y0, y1] = [u.scales.y?.min ?? 0, u.scales.y?.max ?? 1];
    const place = (v: number) => (this.options.log ? Math.log10(v) : v);
    const px = (x: number) => left + ((x - x0) / (x1 - x0 || 1)) * (w - left - 20);
    const py = (y: number) => hgt - 36 - ((place(y) - place(y0)) / (place(y1) - place(y0) || 1)) * (hgt - 36 - top);
    const label = { "font-family": "system-ui, sans-serif", "font-size": 11, fill: css("--muted") };
    const root = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width: w, height: hgt, viewBox: `0 0 ${w} ${hgt}` });
    root.append(svg("rect", { width: w, height: hgt, fill: css("--surface") }));
    root.append(svg("text", { ...label, x: 12, y: 20, "font-size": 14, "font-weight": 600, fill: css("--text") }, this.options.title));
    for (let i = 0; i <= 5; i += 1) {
      const part = i / 5;
      const x = x0 + part * (x1 - x0);
      const y = this.options.log ? 10 ** (place(y0) + part * (place(y1) - place(y0))) : y0 + part * (y1 - y0);
      root.append(svg("line", { x1: left, x2: w - 20, y1: py(y), y2: py(y), stroke: css("--grid") }));
      root.append(svg("text", { ...label, x: left - 6, y: py(y) + 4, "text-anchor": "end" }, num(y, 3)));
      root.append(svg("text", { ...label, x: px(x), y: hgt - 16, "text-anchor": "middle" }, ofAxis(this.options.axis, Number(x.toPrecision(3)))));
    }
    const xs = u.data[0] as number[];
    u.series.forEach((s, i) => {
      if (i === 0) return;
      let path = "";
      xs.forEach((x, j) => {
        const y = u.data[i]?.[j];
        if (y === null || y === undefined || x < x0 || x > x1) return;
        path += `${path ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`;
      });
      const stroke = String(typeof s.stroke === "function" ? s.stroke(u, i) : s.stroke);
      root.append(svg("path", { d: path, fill: "none", stroke, "stroke-width": s.width ?? 1.5 }));
    });
    this.curves.forEach((curve, i) => {
      const x = 12 + i * (w / Math.max(3, this.curves.length));
      root.append(svg("rect", { x, y: 28, width: 10, height: 8, fill: curve.colour }));
      root.append(svg("text", { ...label, x: x + 14, y: 36 }, curve.label));
    });
    svgFile(this.options.title, root);
  }
}

/** A tick of a time axis. */
function short(seconds: number): string {
  if (seconds >= 3600) return `${Number((seconds / 3600).toFixed(2))} h`;
  if (seconds >= 60) return `${Number((seconds / 60).toFixed(1))} min`;
  return `${num(seconds, 3)} s`;
}
