// Where the time went: lanes of all that works, from the whole run down to one span; what held each step back.

import { api } from "../api";
import { css } from "../charts";
import type { Context, View } from "../context";
import { debounce, empty, h, replace } from "../dom";
import { bytes, duration, num, plain } from "../format";
import { remember } from "../router";
import { csv, png } from "../save";
import type { Lanes, Span, StepPhases } from "../types";

const ROW = 20;
const MOST_LANES = 400;
const TOP = 24;
const DEEPEST = 3;
/** States in which nothing works for a rollout: drawn faintly. */
const IDLE = new Set(["queued", "accepted"]);
const KINDS = ["controller", "trainer", "engine", "reward", "environment", "rollout"];

/** One colour for one name, everywhere and always. */
function colourIndex(name: string): number {
  const known: Record<string, number> = { generate: 0, generating: 0, decode: 0, prefill: 4, train: 1, forward_backward: 1, sync: 2, reward: 3, rewarding: 3, evaluate: 5, environment: 6, step: 6, queued: 7, record: 7, optimizer: 4, advantages: 6, accepted: 7, checkpoint: 4 };
  const word = name.split(" ")[0] as string;
  if (known[word] !== undefined) return known[word];
  let sum = 0;
  for (const ch of word) sum = (sum * 31 + ch.charCodeAt(0)) % 997;
  return sum % 8;
}

export async function time({ root, params, run, signal, reopen }: Context): Promise<View> {
  if (!run) {
    root.append(empty("No run", "There is no run to show the time of."));
    return {};
  }
  const id = run.id;
  let lanes: Lanes;
  const whole = { from: 0, to: 1 };
  let view = { from: 0, to: 1 };
  let steps: StepPhases[] = [];
  try {
    lanes = await api.lanes(id, { max: 4000 }, signal);
    steps = await api.steps(id, signal).catch(() => []);
  } catch (error) {
    if (!signal.aborted) root.append(empty("No trace", (error as Error).message));
    return {};
  }
  if (!lanes.lanes.length) {
    root.append(empty("No trace yet", lanes.problem ?? "A run writes trace.json while it works; it appears here by itself."));
    return { changed: (which, kindsOf) => which === id && kindsOf.includes("trace") && reopen() };
  }
  whole.from = lanes.start_s;
  whole.to = Math.max(lanes.end_s, lanes.start_s + 1e-6);
  view = { from: Number(params.get("from") ?? whole.from), to: Number(params.get("to") ?? whole.to) };
  if (!(view.to > view.from)) view = { ...whole };

  const canvas = h("canvas", { class: "lanes-canvas", tabindex: 0, role: "img", "aria-label": "Lanes over time" });
  const box = h("div", { class: "lanes-box" }, canvas);
  const tip = h("div", { class: "tip float", hidden: true });
  const span = h("div", { class: "span-detail", "aria-live": "polite" }, h("span", { class: "muted" }, "Wheel: zoom · drag: move · click: one span · double click: into it · 0: whole run"));
  const extent = h("span", { class: "muted" });
  let filter = params.get("kind") ?? "";
  const kinds = KINDS.filter((k) => lanes.lanes.some((l) => l.kind === k));
  const kindButtons = h("div", { class: "segmented wrap", role: "group", "aria-label": "Lanes" }, ["", ...kinds].map((k) =>
    h("button", {
      type: "button",
      "aria-pressed": String(k === filter),
      onclick: (e: Event) => {
        filter = k;
        remember({ kind: k });
        kindButtons.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === e.currentTarget)));
        draw();
      },
    }, k || "all"),
  ));
  const tools = h("div", { class: "tools", role: "toolbar", "aria-label": "Time" },
    kindButtons,
    h("span", { class: "segmented" },
      h("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.5, 0.5) }, "+"),
      h("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(2, 0.5) }, "−"),
      h("button", { type: "button", onclick: () => look(whole.from, whole.to) }, "whole run"),
    ),
    extent,
    h("span", { class: "grow" }),
    h("button", { type: "button", onclick: () => png(`${run.name}-time`, canvas) }, "PNG"),
    h("button", { type: "button", onclick: () => csv(`${run.name}-spans`, ["lane", "name", "start_s", "end_s"], lanes.spans.map((s) => [lanes.lanes[s.lane]?.name, s.name, s.start_s, s.end_s])) }, "CSV"),
  );
  const stepsPanel = h("section", { class: "panel", "aria-label": "Phases of steps" });
  root.append(h("div", { class: "time" }, tools, box, tip, span, stepsPanel));

  let shownLanes: number[] = [];
  let tops: number[] = [];
  let depths = depthsOf(lanes);
  const depthOfLane = new Map<string, number>();
  const labelWidth = () => (box.clientWidth < 600 ? 92 : 168);

  function draw(): void {
    const width = box.clientWidth;
    if (!width) return;
    const active = new Set(lanes.spans.map((s) => s.lane));
    shownLanes = lanes.lanes.map((_, i) => i).filter((i) => active.has(i) && (!filter || lanes.lanes[i]?.kind === filter)).slice(0, MOST_LANES);
    lanes.spans.forEach((s, i) => {
      const lane = lanes.lanes[s.lane]?.name ?? "";
      depthOfLane.set(lane, Math.max(depthOfLane.get(lane) ?? 0, depths[i] as number));
    });
    let height = TOP;
    tops = [];
    for (const lane of shownLanes) {
      tops[lane] = height;
      height += ROW * (1 + (depthOfLane.get(lanes.lanes[lane]?.name ?? "") ?? 0));
    }
    height += 6;
    const ratio = devicePixelRatio || 1;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const c = canvas.getContext("2d") as CanvasRenderingContext2D;
    c.scale(ratio, ratio);
    c.fillStyle = css("--surface");
    c.fillRect(0, 0, width, height);
    const left = labelWidth();
    const toX = (t: number) => left + ((t - view.from) / (view.to - view.from)) * (width - left);
    drawAxis(c, width, height, left, toX);
    const colours = Array.from({ length: 8 }, (_, i) => css(`--c${i}`));
    const onColour = css("--on-colour");
    const text = css("--muted");
    c.save();
    c.beginPath();
    c.rect(left, TOP, width - left, height);
    c.clip();
    c.font = "11px system-ui, sans-serif";
    for (const [i, s] of lanes.spans.entries()) {
      const laneTop = tops[s.lane];
      if (laneTop === undefined || s.end_s < view.from || s.start_s > view.to) continue;
      const x = Math.max(left, toX(s.start_s));
      const w = Math.max(1, Math.min(width, toX(s.end_s)) - x - 0.5);
      const y = laneTop + (depths[i] as number) * ROW + 2;
      c.fillStyle = colours[colourIndex(s.name)] as string;
      const idle = IDLE.has(s.name);
      c.globalAlpha = idle ? 0.28 : 1;
      c.fillRect(x, y, w, ROW - 4);
      c.globalAlpha = 1;
      if (s === chosen) {
        c.strokeStyle = css("--text");
        c.lineWidth = 2;
        c.strokeRect(x, y, w, ROW - 4);
      }
      if (w > 34) {
        c.fillStyle = idle ? text : onColour;
        c.fillText(clipText(c, s.name, w - 8), x + 4, y + 12);
      }
    }
    c.restore();
    extent.textContent = `${duration(view.from - whole.from)} to ${duration(view.to - whole.from)} (${duration(view.to - view.from)})${lanes.merged ? " · short spans are joined: zoom in" : ""}${lanes.indexing ? ` · ${bytes(lanes.indexing.bytes_left)} of the trace are still to read` : ""}`;
    canvas.setAttribute("aria-label", `${shownLanes.length} lanes, ${extent.textContent}`);
  }

  function drawAxis(c: CanvasRenderingContext2D, width: number, height: number, left: number, toX: (t: number) => number): void {
    c.font = "11px system-ui, sans-serif";
    const tick = niceStep((view.to - view.from) / Math.max(2, (width - left) / 110));
    c.strokeStyle = css("--grid");
    c.fillStyle = css("--muted");
    for (let t = Math.ceil((view.from - whole.from) / tick) * tick; t <= view.to - whole.from; t += tick) {
      const x = toX(t + whole.from);
      c.beginPath();
      c.moveTo(x, TOP);
      c.lineTo(x, height);
      c.stroke();
      c.fillText(duration(t), x + 3, 15);
    }
    let before = "";
    for (const lane of shownLanes) {
      const info = lanes.lanes[lane];
      const y = tops[lane] as number;
      if (info && info.kind !== before) {
        c.beginPath();
        c.moveTo(0, y);
        c.lineTo(width, y);
        c.stroke();
        before = info.kind;
      }
      c.fillText(clipText(c, info?.name ?? "", left - 16), 8, y + 14);
    }
  }

  const fetchView = debounce(async () => {
    remember({ from: view.from === whole.from ? null : num6(view.from), to: view.to === whole.to ? null : num6(view.to) });
    const margin = (view.to - view.from) * 0.25;
    const answer = await api.lanes(id, { from_s: num6(view.from - margin), to_s: num6(view.to + margin), max: 4000 }, signal).catch(() => null);
    if (!answer || signal.aborted) return;
    lanes = answer;
    depths = depthsOf(lanes);
    chosen = null;
    draw();
  }, 160);

  function look(from: number, to: number): void {
    const length = Math.max(1e-5, Math.min(to - from, whole.to - whole.from));
    const start = Math.max(whole.from, Math.min(from, whole.to - length));
    view = { from: start, to: start + length };
    requestAnimationFrame(draw);
    fetchView();
  }
  function zoom(factor: number, at: number): void {
    const length = view.to - view.from;
    const pivot = view.from + at * length;
    look(pivot - at * length * factor, pivot + (1 - at) * length * factor);
  }

  // pointer ----------------------------------------------------------------------------------------------------------
  let chosen: Span | null = null;
  const fraction = (x: number) => (x - labelWidth()) / (box.clientWidth - labelWidth());
  function under(event: MouseEvent): Span | null {
    const at = canvas.getBoundingClientRect();
    const t = view.from + fraction(event.clientX - at.left) * (view.to - view.from);
    const y = event.clientY - at.top;
    const lane = shownLanes.findLast((l) => (tops[l] as number) <= y);
    const depth = lane === undefined ? 0 : Math.floor((y - (tops[lane] as number)) / ROW);
    const slack = ((view.to - view.from) / box.clientWidth) * 2;
    let best: Span | null = null;
    for (const [i, s] of lanes.spans.entries()) {
      if (s.lane === lane && depths[i] === depth && s.start_s - slack <= t && s.end_s + slack >= t && (!best || s.end_s - s.start_s < best.end_s - best.start_s)) best = s;
    }
    return best;
  }
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && Math.abs(event.deltaX) <= Math.abs(event.deltaY) && event.shiftKey) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = (event.deltaX / box.clientWidth) * (view.to - view.from);
      look(view.from + by, view.to + by);
    } else zoom(Math.exp(event.deltaY * 0.0016), Math.max(0, fraction(event.offsetX)));
  }, { passive: false });
  let drag: { x: number; from: number; to: number } | null = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, from: view.from, to: view.to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const by = ((drag.x - event.clientX) / (box.clientWidth - labelWidth())) * (drag.to - drag.from);
      if (Math.abs(drag.x - event.clientX) > 3) look(drag.from + by, drag.to + by);
      tip.hidden = true;
      return;
    }
    const s = under(event);
    tip.hidden = !s;
    if (!s) return;
    replace(tip, h("b", {}, s.name), h("div", {}, `${lanes.lanes[s.lane]?.name}`), h("div", {}, duration(s.end_s - s.start_s)));
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 220)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("pointerup", (event) => {
    const still = drag && Math.abs(drag.x - event.clientX) <= 3;
    drag = null;
    if (!still) return;
    chosen = under(event);
    if (chosen) describe(chosen);
    draw();
  });
  canvas.addEventListener("dblclick", (event) => {
    const s = under(event);
    if (s) look(s.start_s - (s.end_s - s.start_s) * 0.1, s.end_s + (s.end_s - s.start_s) * 0.1);
  });
  canvas.addEventListener("keydown", (event) => {
    const by = (view.to - view.from) * 0.2;
    if (event.key === "ArrowRight") look(view.from + by, view.to + by);
    else if (event.key === "ArrowLeft") look(view.from - by, view.to - by);
    else if (event.key === "ArrowUp") zoom(0.7, 0.5);
    else if (event.key === "ArrowDown") zoom(1.4, 0.5);
    else return;
    event.preventDefault();
  });

  function describe(s: Span): void {
    replace(
      span,
      h("b", {}, s.name),
      h("span", { class: "muted" }, lanes.lanes[s.lane]?.name ?? ""),
      h("span", {}, `${duration(s.end_s - s.start_s)}, from ${duration(s.start_s - whole.from)}`),
      Object.entries(s.args ?? {}).map(([key, value]) => h("span", {}, h("span", { class: "muted" }, `${key} `), plain(value))),
    );
  }

  // phases -----------------------------------------------------------------------------------------------------------
  function drawSteps(): void {
    const names = [...new Set(steps.flatMap((s) => Object.keys(s.phases)))];
    const total = (name: string) => steps.reduce((sum, s) => sum + (s.phases[name] ?? 0), 0);
    names.sort((a, b) => total(b) - total(a));
    const longest = Math.max(...steps.map((s) => Object.values(s.phases).reduce((a: number, b) => a + (b ?? 0), 0)), 1e-9);
    const held = new Map<string, number>();
    for (const s of steps) if (s.held_back_by) held.set(s.held_back_by, (held.get(s.held_back_by) ?? 0) + 1);
    const worst = [...held].sort((a, b) => b[1] - a[1])[0];
    const shown = steps.slice(-500);
    replace(
      stepsPanel,
      h("header", { class: "panel-head" },
        h("h2", {}, "What held each step back"),
        worst ? h("span", {}, h("b", {}, worst[0]), ` in ${num(worst[1])} of ${num(steps.length)} steps`) : null,
        h("span", { class: "grow" }),
        h("button", { type: "button", onclick: () => csv(`${run?.name}-phases`, ["step", "held_back_by", ...names], steps.map((s) => [s.step, s.held_back_by, ...names.map((n) => s.phases[n] ?? null)])) }, "CSV"),
      ),
      steps.length ? h("div", { class: "legend" }, names.slice(0, 10).map((n) => h("span", { class: "key" }, h("i", { style: { background: css(`--c${colourIndex(n)}`) } }), n))) : empty("No steps yet"),
      h("div", { class: "phases", tabindex: 0, role: "region", "aria-label": "Steps" },
        shown.map((s) => {
          const sum = Object.values(s.phases).reduce((a: number, b) => a + (b ?? 0), 0);
          return h("button", {
            type: "button",
            class: "phase-row",
            disabled: s.start_s === null,
            title: "Show this step",
            onclick: () => s.start_s !== null && s.end_s !== null && look(s.start_s, s.end_s),
          },
            h("span", { class: "num" }, num(s.step)),
            h("span", { class: "phase-bar", "aria-hidden": "true" }, names.map((n) => h("i", { style: { width: `${((s.phases[n] ?? 0) / longest) * 100}%`, background: css(`--c${colourIndex(n)}`) } }))),
            h("span", { class: "num" }, duration(sum)),
            h("span", { class: "held" }, s.held_back_by ?? "–"),
          );
        }),
      ),
    );
  }

  const observer = new ResizeObserver(() => draw());
  observer.observe(box);
  drawSteps();
  draw();
  if (params.has("from")) fetchView();
  /** Follows the trace to its end: of a run that grows, and of a long trace that the server reads for seconds. */
  async function follow(): Promise<void> {
    const atEnd = view.to >= whole.to;
    const answer = await api.lanes(id, { max: 10 }, signal).catch(() => null);
    if (!answer || signal.aborted) return;
    const all = view.from <= whole.from && atEnd;
    whole.to = Math.max(whole.to, answer.end_s);
    if (all) look(whole.from, whole.to);
    steps = await api.steps(id, signal).catch(() => steps);
    drawSteps();
    if (answer.indexing) setTimeout(() => !signal.aborted && void follow(), 300);
    else if (lanes.indexing) fetchView();
  }
  const grown = debounce(() => void follow(), 1000);
  if (lanes.indexing) void follow();
  return {
    changed: (which, kindsOf) => {
      if (which === id && (kindsOf.includes("trace") || kindsOf.includes("metrics"))) grown();
    },
    themed: () => {
      draw();
      drawSteps();
    },
    key: (key) => {
      if (key === "+" || key === "=") zoom(0.6, 0.5);
      else if (key === "-") zoom(1.6, 0.5);
      else if (key === "0") look(whole.from, whole.to);
      else return false;
      return true;
    },
    close: () => observer.disconnect(),
  };
}

/** How deep each span lies within others of its lane, at most `DEEPEST`. */
function depthsOf(lanes: Lanes): number[] {
  const order = lanes.spans.map((_, i) => i);
  const at = (i: number) => lanes.spans[i] as Span;
  order.sort((a, b) => at(a).start_s - at(b).start_s || at(b).end_s - at(a).end_s);
  const open: number[][] = [];
  const depths = new Array<number>(order.length).fill(0);
  for (const i of order) {
    const s = at(i);
    const ends = (open[s.lane] ??= []);
    let depth = ends.findIndex((end) => end <= s.start_s + 1e-6);
    if (depth < 0) depth = Math.min(ends.length, DEEPEST);
    ends[depth] = s.end_s;
    ends.length = depth + 1;
    depths[i] = depth;
  }
  return depths;
}

function num6(value: number): number {
  return Number(value.toFixed(6));
}

function niceStep(raw: number): number {
  const nice = [1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400];
  return nice.find((n) => n >= raw) ?? Math.ceil(raw / 86400) * 86400;
}

function clipText(c: CanvasRenderingContext2D, text: string, width: number): string {
  if (c.measureText(text).width <= width) return text;
  let end = Math.min(text.length, 60);
  while (end > 1 && c.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
