// Curves of several runs over one another, found by name; what their configurations differ in.

import { api } from "../api";
import { Chart, type ChartOptions, type Curve, palette } from "../charts";
import type { Context, View } from "../context";
import { debounce, empty, h, replace, toast } from "../dom";
import { ago, num, plain } from "../format";
import { link, remember } from "../router";
import { csv } from "../save";
import type { Metrics, RunInfo, Series } from "../types";

const FIRST = ["reward/mean", "accuracy", "eval/accuracy", "eval/reward", "training/loss", "rollout/length_mean", "training/policy/entropy_estimate", "training/grad_norm"];
const GROUP_ORDER = ["key curves", "reward", "eval", "training", "rollout", "time", "throughput"];
const MAX_SHOWN = 8;

interface Card {
  kind: string;
  name: string;
  root: HTMLElement;
  host: HTMLElement;
  now: HTMLElement;
  chart: Chart | null;
  visible: boolean;
  curves: Curve[];
}

export async function overview({ root, params, runs, signal }: Context): Promise<View> {
  const asked = params.get("runs")?.split(",").filter(Boolean);
  const readable = runs.filter((r) => r.status !== "unreadable");
  const newest = [...readable].sort((a, b) => (b.updated_s ?? 0) - (a.updated_s ?? 0));
  let shown: string[] = (asked ?? newest.slice(0, MAX_SHOWN).map((r) => r.id)).filter((id) => runs.some((r) => r.id === id));
  const state = {
    q: params.get("q") ?? "",
    smoothing: Number(params.get("smooth") ?? 0),
    axis: (params.get("x") === "time" ? "time" : "step") as "step" | "time",
    log: params.get("log") === "1",
    big: params.get("big") ?? "",
  };
  const cards = new Map<string, Card>();
  const known = new Map<string, Metrics>();
  /** By run, kind and name; and whether it is all of it, which smoothing needs, or what suffices to draw it. */
  const series = new Map<string, Series>();
  const keyOf = (id: string, c: Card) => `${id}|${c.kind}|${c.name}|${state.smoothing > 0 ? "full" : "drawn"}`;

  const slots = new Map<string, number>();
  /** A run keeps its colour while it is shown; the first that is free goes to the next one. */
  function colourOf(id: string): string {
    for (const other of [...slots.keys()]) if (!shown.includes(other)) slots.delete(other);
    for (const other of shown) {
      if (slots.has(other)) continue;
      const taken = new Set(slots.values());
      const free = Array.from({ length: 8 }, (_, i) => i).find((i) => !taken.has(i));
      slots.set(other, free ?? slots.size % 8);
    }
    return palette()[slots.get(id) ?? 7] as string;
  }
  const nameOf = (id: string) => runs.find((r) => r.id === id)?.name ?? id;

  // the list of runs -------------------------------------------------------------------------------------------------
  const list = h("ul", { class: "runs" });
  const side = h("aside", { class: "side", "aria-label": "Runs" }, h("div", { class: "side-head" }, h("h2", {}, "Runs"), runButtons()), list);

  function runButtons(): HTMLElement {
    const choose = (ids: string[]) => () => select(ids);
    return h(
      "span",
      { class: "quiet-buttons" },
      h("button", { type: "button", onclick: choose(readable.map((r) => r.id)) }, "all"),
      h("button", { type: "button", onclick: choose([]) }, "none"),
    );
  }

  function drawRuns(): void {
    replace(list, runs.map((run) => runItem(run)));
  }

  function runItem(run: RunInfo): HTMLElement {
    const on = shown.includes(run.id);
    const progress = run.num_steps && run.step !== null ? Math.min(1, run.step / run.num_steps) : null;
    const box = h("input", {
      type: "checkbox",
      checked: on,
      disabled: run.status === "unreadable",
      onchange: () => select(on ? shown.filter((id) => id !== run.id) : [...shown, run.id]),
    });
    return h(
      "li",
      { class: `run ${on ? "on" : ""}`, vars: { "--run": colourOf(run.id) } },
      h(
        "label",
        {},
        box,
        h("span", { class: "swatch", "aria-hidden": "true" }),
        h("span", { class: "run-name", title: run.path }, run.name),
        h("span", { class: `status ${run.status}` }, run.status),
      ),
      run.problem ? h("p", { class: "problem" }, run.problem) : null,
      run.status === "unreadable"
        ? null
        : h(
            "div",
            { class: "run-facts" },
            h("span", {}, `${num(run.step)}${run.num_steps ? ` / ${num(run.num_steps)}` : ""} steps`),
            h("span", { title: "latest reward" }, `reward ${num(run.reward, 3)}`),
            run.held_out !== null ? h("span", { title: "latest held-out measure" }, `held-out ${num(run.held_out, 3)}`) : null,
          ),
      progress !== null ? h("div", { class: "bar", "aria-hidden": "true" }, h("i", { style: { width: `${progress * 100}%` } })) : null,
      run.status === "unreadable"
        ? null
        : h(
            "div",
            { class: "run-links" },
            h("a", { href: link("answers", { run: run.id }), "aria-label": `Answers about ${run.name}` }, "answers"),
            h("a", { href: link("rollouts", { run: run.id }), "aria-label": `Rollouts of ${run.name}` }, "rollouts"),
            h("a", { href: link("time", { run: run.id }), "aria-label": `Time of ${run.name}` }, "time"),
            h("a", { href: link("health", { run: run.id }), "aria-label": `Health of ${run.name}` }, "health"),
            h("span", { class: "grow" }, ago(run.updated_s)),
          ),
    );
  }

  function select(ids: string[]): void {
    shown = ids;
    remember({ runs: ids.join(",") || "-" });
    drawRuns();
    void refresh();
    void drawDiff();
  }

  // the tools --------------------------------------------------------------------------------------------------------
  const count = h("span", { class: "muted", "aria-live": "polite" });
  const search = h("input", {
    type: "search",
    placeholder: "Search metrics…  /",
    "aria-label": "Search metrics",
    value: state.q,
    oninput: debounce(() => {
      state.q = search.value;
      remember({ q: state.q });
      layout();
    }, 120),
  });
  const smoothValue = h("output", {}, state.smoothing.toFixed(2));
  const smoothing = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: state.smoothing,
    "aria-label": "Smoothing",
    oninput: () => {
      state.smoothing = Number(smoothing.value);
      smoothValue.textContent = state.smoothing.toFixed(2);
      remember({ smooth: state.smoothing || null });
      redraw();
      void load();
    },
  });
  const axisButtons = (["step", "time"] as const).map((axis) =>
    h("button", {
      type: "button",
      "aria-pressed": state.axis === axis ? "true" : "false",
      onclick: () => {
        state.axis = axis;
        axisButtons.forEach((b) => b.setAttribute("aria-pressed", b.textContent === axis ? "true" : "false"));
        remember({ x: axis === "time" ? "time" : null });
        redraw();
      },
    }, axis),
  );
  const logButton = h("button", {
    type: "button",
    "aria-pressed": String(state.log),
    onclick: () => {
      state.log = !state.log;
      logButton.setAttribute("aria-pressed", String(state.log));
      remember({ log: state.log ? 1 : null });
      redraw();
    },
  }, "log");
  const tools = h(
    "div",
    { class: "tools", role: "toolbar", "aria-label": "Curves" },
    search,
    h("label", { class: "slider" }, "smooth", smoothing, smoothValue),
    h("div", { class: "segmented", role: "group", "aria-label": "Axis" }, axisButtons),
    h("div", { class: "segmented" }, logButton),
    count,
  );

  // the curves -------------------------------------------------------------------------------------------------------
  const grid = h("div", { class: "groups" });
  const diff = h("section", { class: "panel", "aria-label": "What the configurations differ in" });
  const first = params.get("show") === "differences";
  root.append(h("div", { class: "overview" }, side, h("div", { class: "main" }, tools, first ? [diff, grid] : [grid, diff])));

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        const card = [...cards.values()].find((c) => c.root === entry.target);
        if (card) card.visible = entry.isIntersecting;
      }
      void load();
    },
    { rootMargin: "300px" },
  );

  function options(card: Card): ChartOptions {
    const big = state.big === `${card.kind}:${card.name}`;
    return { title: card.name, axis: state.axis, log: state.log, smoothing: state.smoothing, height: big ? 420 : 176, syncKey: "overview" };
  }

  function card(kind: string, name: string): Card {
    const key = `${kind}:${name}`;
    const existing = cards.get(key);
    if (existing) return existing;
    const host = h("div", { class: "plot" });
    const now = h("span", { class: "now" });
    const made: Card = { kind, name, host, now, chart: null, visible: false, curves: [], root: document.createElement("div") };
    made.root = h(
      "article",
      { class: "card", "data-metric": name },
      h(
        "header",
        {},
        h("h4", { title: name }, name),
        now,
        h(
          "span",
          { class: "card-tools" },
          h("button", { type: "button", title: "Larger", "aria-label": `Larger: ${name}`, onclick: () => enlarge(made) }, "⤢"),
          h("button", { type: "button", "aria-label": `Save ${name} as PNG`, onclick: () => made.chart?.savePng() }, "PNG"),
          h("button", { type: "button", "aria-label": `Save ${name} as SVG`, onclick: () => made.chart?.saveSvg() }, "SVG"),
          h("button", { type: "button", "aria-label": `Save ${name} as CSV`, onclick: () => void saveCsv(made) }, "CSV"),
        ),
      ),
      host,
    );
    cards.set(key, made);
    return made;
  }

  function enlarge(of: Card): void {
    const key = `${of.kind}:${of.name}`;
    state.big = state.big === key ? "" : key;
    remember({ big: state.big });
    for (const c of cards.values()) c.root.classList.toggle("big", state.big === `${c.kind}:${c.name}`);
    requestAnimationFrame(() => {
      redraw();
      of.root.scrollIntoView({ block: "nearest" });
    });
  }

  async function saveCsv(of: Card): Promise<void> {
    const ids = shown.filter((id) => has(id, of));
    try {
      const all = await Promise.all(ids.map((id) => api.series(id, [of.name], of.kind, true, signal)));
      const rows = all.flatMap((s, k) => s.steps.map((step, i) => [nameOf(ids[k] as string), step, s.time_s[i] ?? null, s.series[of.name]?.[i] ?? null]));
      csv(of.name, ["run", "step", "time_s", of.name], rows);
    } catch (error) {
      if (!signal.aborted) toast((error as Error).message);
    }
  }

  /** Metrics of the shown runs that the search finds, in groups by their first part. */
  function layout(): void {
    const words = state.q.toLowerCase().split(/\s+/).filter(Boolean);
    const names = new Map<string, [string, string]>();
    for (const id of shown) {
      for (const { kind, name } of known.get(id)?.names ?? []) names.set(`${kind}:${name}`, [kind, name]);
    }
    const found = [...names.values()].filter(([, name]) => words.every((w) => name.toLowerCase().includes(w)));
    const groups = new Map<string, [string, string][]>();
    if (!words.length) {
      const first = FIRST.flatMap((name) => found.filter(([, n]) => n === name));
      if (first.length) groups.set("key curves", first);
    }
    for (const [kind, name] of found.sort((a, b) => a[1].localeCompare(b[1]))) {
      const group = name.includes("/") ? (name.split("/")[0] as string) : "general";
      groups.set(group, [...(groups.get(group) ?? []), [kind, name]]);
    }
    count.textContent = `${found.length} of ${names.size} metrics`;
    const rank = (g: string) => (GROUP_ORDER.indexOf(g) + 1 || 99) as number;
    const ordered = [...groups].sort((a, b) => rank(a[0]) - rank(b[0]) || a[0].localeCompare(b[0]));
    const placed = new Set<string>();
    observer.disconnect();
    replace(
      grid,
      ordered.map(([group, members], i) => {
        const fresh = members.filter(([k, n]) => !placed.has(`${k}:${n}`));
        fresh.forEach(([k, n]) => placed.add(`${k}:${n}`));
        if (!fresh.length) return null;
        const body = h("div", { class: "cards" }, fresh.map(([k, n]) => card(k, n).root));
        return h("details", { class: "group", open: words.length > 0 || i < 3 }, h("summary", {}, h("h3", {}, group), h("span", { class: "muted" }, `${fresh.length}`)), body);
      }),
      names.size ? (found.length ? null : empty("No metric has such a name", `Nothing matches “${state.q}”.`)) : empty("Nothing to draw", shown.length ? "These runs have no metrics yet." : "Tick a run at the left."),
    );
    for (const c of cards.values()) {
      c.root.classList.toggle("big", state.big === `${c.kind}:${c.name}`);
      if (c.root.isConnected) observer.observe(c.root);
      else c.visible = false;
    }
  }

  let loading: Promise<void> | null = null;
  /** Fetches what cards in sight miss, one request per run and kind. */
  function load(): Promise<void> {
    loading ??= fetchMissing().finally(() => {
      loading = null;
    });
    return loading;
  }

  async function fetchMissing(): Promise<void> {
    await new Promise((done) => setTimeout(done, 30));
    for (;;) {
      const wanted = new Map<string, string[]>();
      for (const c of cards.values()) {
        if (!c.visible) continue;
        for (const id of shown) {
          if (has(id, c) && !series.has(keyOf(id, c))) {
            const key = `${id}|${c.kind}`;
            wanted.set(key, [...(wanted.get(key) ?? []), c.name]);
          }
        }
      }
      if (!wanted.size) break;
      const full = state.smoothing > 0;
      await Promise.all(
        [...wanted].map(async ([key, names]) => {
          const [id, kind] = key.split("|") as [string, string];
          const answer = await api.series(id, names, kind, full, signal).catch(() => null);
          for (const name of names) {
            series.set(`${id}|${kind}|${name}|${full ? "full" : "drawn"}`, answer ?? { steps: [], time_s: [], series: {} });
          }
        }),
      );
      if (signal.aborted) return;
    }
    redraw();
  }

  function has(id: string, c: Card): boolean {
    return (known.get(id)?.names ?? []).some((n) => n.name === c.name && n.kind === c.kind);
  }

  function redraw(): void {
    for (const c of cards.values()) {
      if (!c.visible || !c.root.isConnected) continue;
      c.curves = shown.flatMap((id) => {
        const s = series.get(keyOf(id, c)) ?? series.get(`${id}|${c.kind}|${c.name}|drawn`);
        const y = s?.series[c.name];
        if (!s || !y?.some((v) => v !== null)) return [];
        return [{ label: nameOf(id), colour: colourOf(id), x: state.axis === "time" ? s.time_s : s.steps, y }];
      });
      const last = c.curves.slice(0, 3).map((curve) => h("b", { vars: { "--run": curve.colour } }, num(curve.y.filter((v) => v !== null).at(-1) ?? null, 3)));
      replace(c.now, last, c.curves.length > 3 ? "…" : "");
      if (c.chart) c.chart.set(c.curves, options(c));
      else c.chart = new Chart(c.host, c.curves, options(c));
    }
  }

  async function refresh(): Promise<void> {
    await Promise.all(
      shown.filter((id) => !known.has(id)).map(async (id) => {
        const metrics = await api.metrics(id, signal).catch(() => null);
        if (metrics) known.set(id, metrics);
      }),
    );
    if (signal.aborted) return;
    layout();
    redraw();
  }

  async function drawDiff(): Promise<void> {
    replace(diff);
    if (shown.length < 2) return;
    const answer = await api.diff(shown, signal).catch(() => null);
    if (!answer) return;
    const ids = [...shown];
    const save = () => csv("configuration", ["key", ...ids.map(nameOf)], answer.keys.map((k) => [k.key, ...k.values]));
    replace(
      diff,
      h("header", { class: "panel-head" }, h("h2", {}, "What the configurations differ in"), h("span", { class: "muted" }, `${answer.keys.length} keys`), h("button", { type: "button", onclick: save }, "CSV")),
      answer.keys.length
        ? h(
            "div",
            { class: "scroll-x", tabindex: 0, role: "region", "aria-label": "Differences" },
            h(
              "table",
              { class: "plain" },
              h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), ids.map((id) => h("th", { scope: "col", vars: { "--run": colourOf(id) } }, h("span", { class: "swatch" }), nameOf(id))))),
              h("tbody", {}, answer.keys.map((k) => h("tr", {}, h("th", { scope: "row" }, k.key), k.values.map((v) => h("td", {}, plain(v)))))),
            ),
          )
        : empty("Nothing", "The configurations are equal."),
    );
  }

  drawRuns();
  if (!runs.length) replace(grid, empty("No runs here yet", "Start one with `roll train`, or name directories: roll dashboard runs/my-run"));
  else void Promise.all([refresh(), drawDiff()]);

  const reload = debounce(async (id: string) => {
    const fresh = await api.runs(signal).catch(() => null);
    for (const info of fresh ?? []) {
      const at = runs.findIndex((r) => r.id === info.id);
      if (at >= 0) runs[at] = info;
    }
    drawRuns();
    const before = known.get(id)?.names.length;
    known.delete(id);
    const metrics = await api.metrics(id, signal).catch(() => null);
    if (metrics) known.set(id, metrics);
    for (const key of [...series.keys()]) if (key.startsWith(`${id}|`)) series.delete(key);
    if (metrics?.names.length !== before) layout();
    await load();
  }, 300);

  return {
    changed: (id, kinds) => {
      if (shown.includes(id) && (!kinds.length || kinds.includes("metrics"))) reload(id);
    },
    themed: () => {
      drawRuns();
      redraw();
    },
    search: () => search.focus(),
    key: (key) => {
      if (key === "l") logButton.click();
      else if (key === "x") (axisButtons.find((b) => b.getAttribute("aria-pressed") === "false") as HTMLElement).click();
      else return false;
      return true;
    },
    close: () => {
      observer.disconnect();
      for (const c of cards.values()) c.chart?.close();
    },
  };
}
