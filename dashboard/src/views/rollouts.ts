// Every rollout of a run: filtered, sorted, searched; a group side by side.

import { api } from "../api";
import type { Context, View } from "../context";
import { debounce, empty, h, replace, toast } from "../dom";
import { byName, num } from "../format";
import { current, go, link, remember } from "../router";
import { csv } from "../save";
import { type Column, VirtualTable } from "../table";
import type { Facets, Row, Rows } from "../types";

const CHOICES = ["domain", "verdict", "status", "kind"];
const RANGES: [string, string, string][] = [
  ["step", "step_min", "step_max"],
  ["reward", "reward_min", "reward_max"],
  ["tokens", "tokens_min", "tokens_max"],
];
export const FILTERS = [...CHOICES, "correct", "trained", ...RANGES.flatMap(([, a, b]) => [a, b]), "staleness_min", "draw_id"];
const MOST_SAVED = 10_000;

/** How good a reward is, between what the run's lowest and highest are; a colour beside the number, never instead of it. */
export function rewardCell(value: unknown, low = 0, high = 1): Node {
  if (typeof value !== "number") return h("span", { class: "muted" }, "–");
  const part = Math.max(0, Math.min(1, (value - low) / (high - low || 1)));
  return h("span", { class: "reward" }, h("i", { vars: { "--part": part }, "aria-hidden": "true" }), num(value, 3));
}

export function verdictCell(row: Row): Node {
  const verdict = row.verdict ? String(row.verdict) : row.status ? String(row.status) : "–";
  const tone = row.correct === true ? "good" : row.correct === false ? "bad" : "";
  return h("span", { class: `tag ${tone}` }, row.correct === true ? "✓ " : row.correct === false ? "✗ " : "", verdict);
}

export async function rollouts({ root, params, run, signal }: Context): Promise<View> {
  if (!run) {
    root.append(empty("No run", "There is no run to show rollouts of."));
    return {};
  }
  const id = run.id;
  const state: Record<string, string> = {};
  for (const key of [...FILTERS, "q", "sort", "desc"]) {
    const value = params.get(key);
    if (value) state[key] = value;
  }
  let facets: Facets = {};
  let low = 0;
  let high = 1;
  let request = 0;
  let found: Row[] | null = null;
  let sideBySide = false;

  const all: Column<Row>[] = [
    { key: "step", title: "step", width: 62, numeric: true, sortable: true, cell: (r) => num(r.step) },
    { key: "reward", title: "reward", width: 92, numeric: true, sortable: true, cell: (r) => rewardCell(r.reward, low, high) },
    { key: "verdict", title: "verdict", width: 118, sortable: true, cell: verdictCell },
    { key: "advantage", title: "advantage", width: 92, numeric: true, sortable: true, cell: (r) => num(r.advantage, 3) },
    { key: "num_tokens", title: "tokens", width: 74, numeric: true, sortable: true, cell: (r) => num(r.num_tokens) },
    { key: "num_turns", title: "turns", width: 62, numeric: true, sortable: true, cell: (r) => num(r.num_turns) },
    { key: "staleness", title: "stale", width: 62, numeric: true, sortable: true, cell: (r) => num(r.staleness) },
    { key: "domain", title: "domain", width: 104, sortable: true, cell: (r) => String(r.domain ?? "–") },
    { key: "prompt", title: "prompt", width: 180, grow: true, cell: (r) => h("span", { class: "clip" }, String(r.prompt ?? "")) },
    { key: "text", title: "answer", width: 240, grow: true, cell: (r) => h("span", { class: "clip" }, String(r.text ?? "")) },
  ];
  const narrow = innerWidth < 620;
  const columns = narrow ? ["step", "reward", "verdict", "text"].flatMap((k) => all.filter((c) => c.key === k)) : all;
  const query = () => ({ ...state, sort: state.sort ?? null, desc: state.sort ? (state.desc ?? 0) : null });
  const openRow = (row: Row, at: number, tab = "") => go("rollout", { ...state, run: id, row: row.row, at: found ? null : at, tab });

  const table = new VirtualTable<Row>({
    label: "Rollouts",
    columns,
    fetch: async (offset, limit) => (found ? found.slice(offset, offset + limit) : (await api.rollouts(id, { ...query(), offset, limit }, signal)).rows),
    onOpen: (row, at) => (sideBySide ? openRow(row, at, "group") : openRow(row, at)),
    onSort: (key) => {
      const descending = state.sort === key ? state.desc !== "1" : key === "reward" || key === "num_tokens" || key === "advantage";
      state.sort = key;
      state.desc = descending ? "1" : "0";
      remember({ sort: key, desc: state.desc });
      table.setSort(key, descending);
      void reload();
    },
    ...(state.sort ? { sort: { key: state.sort, descending: state.desc === "1" } } : {}),
  });

  const counted = h("span", { class: "muted", "aria-live": "polite", id: "matching" });
  const search = h("input", {
    type: "search",
    placeholder: "Search in prompts and answers…  /",
    "aria-label": "Search in prompts and answers",
    value: state.q ?? "",
    oninput: debounce(() => set("q", search.value), 250),
  });
  const filters = h("div", { class: "filters", role: "group", "aria-label": "Filters" });
  const problem = h("div", {});
  root.append(
    h(
      "div",
      { class: "rollouts" },
      h("div", { class: "tools", role: "toolbar", "aria-label": "Rollouts" }, search, filters, h("span", { class: "grow" }), counted, h("button", { type: "button", onclick: () => clear() }, "Clear"), h("button", { type: "button", onclick: () => void save() }, "CSV")),
      problem,
      table.root,
    ),
  );

  function set(key: string, value: string): void {
    if (value) state[key] = value;
    else delete state[key];
    remember({ [key]: value });
    void reload();
  }

  function clear(): void {
    for (const key of [...FILTERS, "q"]) delete state[key];
    remember(Object.fromEntries([...FILTERS, "q"].map((key) => [key, null])));
    search.value = "";
    drawFilters();
    void reload();
  }

  function drawFilters(): void {
    const choice = (key: string) => {
      const values = facets[key];
      if (!Array.isArray(values) || values.length === 0) return null;
      const options = values.map((f) => h("option", { value: String(f.value), selected: state[key] === String(f.value) }, `${f.value === "" ? "(none)" : f.value} (${num(f.count)})`));
      return h("select", { "aria-label": key, class: state[key] ? "set" : "", onchange: (e: Event) => set(key, (e.target as HTMLSelectElement).value) }, h("option", { value: "" }, key), options);
    };
    const number = (key: string, hint: string, label: string) =>
      h("input", { type: "number", step: "any", class: state[key] ? "set" : "", placeholder: hint, "aria-label": label, value: state[key] ?? "", oninput: debounce((e: Event) => set(key, (e.target as HTMLInputElement).value), 200) });
    const bound = (key: string, end: "min" | "max") => {
      const f = facets[key === "tokens" ? "num_tokens" : key];
      return f && !Array.isArray(f) && f[end] !== null ? num(f[end], 3) : end;
    };
    const either = (key: string, neither: string, yes: string, no: string) =>
      h(
        "select",
        { "aria-label": key, class: state[key] ? "set" : "", onchange: (e: Event) => set(key, (e.target as HTMLSelectElement).value) },
        h("option", { value: "" }, neither),
        h("option", { value: "true", selected: state[key] === "true" }, yes),
        h("option", { value: "false", selected: state[key] === "false" }, no),
      );
    replace(
      filters,
      CHOICES.map(choice),
      either("correct", "right or wrong", "right", "wrong"),
      either("trained", "trained or not", "trained", "not trained"),
      RANGES.map(([name, min, max]) => h("span", { class: "range", role: "group", "aria-label": name }, h("span", {}, name), number(min, bound(name, "min"), `${name}, at least`), "–", number(max, bound(name, "max"), `${name}, at most`))),
      h("span", { class: "range" }, h("span", {}, "stale ≥"), number("staleness_min", "0", "staleness, at least")),
      state.draw_id ? h("button", { type: "button", class: "chip", onclick: () => { set("draw_id", ""); drawFilters(); } }, `draw ${state.draw_id} ×`) : null,
    );
  }

  /** The first window; of a search, all hits, slice by slice until the whole run was read. */
  async function reload(keep = false): Promise<void> {
    const mine = ++request;
    replace(problem);
    try {
      if (state.q) {
        await searchAll(mine, keep);
        return;
      }
      found = null;
      const answer = await api.rollouts(id, { ...query(), offset: 0, limit: 200 }, signal);
      if (mine !== request) return;
      const matching = answer.matching ?? answer.total;
      table.reset(matching, answer.rows, keep);
      say(matching, answer.total);
      if (answer.problems?.length) replace(problem, h("details", { class: "missing padded" }, h("summary", {}, `${answer.problems.length} files cannot be read`), h("ul", {}, answer.problems.map((p) => h("li", {}, p)))));
      if (answer.indexing) {
        counted.textContent = `${num(matching)} rollouts so far, ${num(answer.indexing.files_left)} files to read`;
        setTimeout(() => mine === request && !signal.aborted && void readFacets().then(drawFilters).then(() => reload(true)), 150);
      }
    } catch (error) {
      if (signal.aborted || mine !== request) return;
      table.reset(0);
      replace(problem, empty("No rollouts to show", (error as Error).message));
    }
  }

  async function searchAll(mine: number, keep: boolean): Promise<void> {
    let cursor: string | number | null = null;
    const hits: Row[] = [];
    found = hits;
    for (;;) {
      const answer: Rows = await api.rollouts(id, { ...query(), cursor, limit: 500 }, signal);
      if (mine !== request) return;
      hits.push(...answer.rows);
      table.reset(hits.length, hits.slice(0, 200), keep || cursor !== null);
      const done = answer.complete !== false || answer.cursor === null || answer.cursor === undefined;
      counted.textContent = `${num(hits.length)} found${done ? "" : `, searched ${num(answer.searched ?? 0)} of ${num(answer.total)}…`}`;
      if (done) break;
      cursor = answer.cursor ?? null;
    }
    if (!hits.length) replace(problem, empty("Nothing found", `No prompt or answer has “${state.q}” in it.`));
  }

  function say(matching: number, total: number): void {
    counted.textContent = matching === total ? `${num(total)} rollouts` : `${num(matching)} of ${num(total)}`;
    if (!total) replace(problem, empty("No rollouts yet", "They appear here as soon as the first step has recorded them."));
    else if (!matching) replace(problem, empty("No rollout is like that", "Widen or clear the filters."));
  }

  async function save(): Promise<void> {
    const rows: Row[] = found ? [...found] : [];
    while (!found && rows.length < MOST_SAVED) {
      const answer = await api.rollouts(id, { ...query(), offset: rows.length, limit: 500 }, signal);
      rows.push(...answer.rows);
      if (answer.rows.length === 0 || rows.length >= (answer.matching ?? answer.total)) break;
    }
    if (rows.length >= MOST_SAVED) toast(`Only the first ${num(MOST_SAVED)} rows are saved.`);
    const names = [...new Set(rows.flatMap((r) => Object.keys(r)))];
    csv(`${run?.name}-rollouts`, names, rows.map((r) => names.map((n) => r[n])));
  }

  const readFacets = async () => {
    facets = await api.facets(id, signal).catch(() => ({}));
    const range = facets.reward;
    if (range && !Array.isArray(range)) [low, high] = [range.min ?? 0, range.max ?? 1];
  };
  drawFilters();
  void Promise.all([reload(), readFacets().then(drawFilters)]).then(() => table.root.querySelector<HTMLElement>(".vt-scroll")?.focus({ preventScroll: true }));

  const grown = debounce(() => {
    if (current().view !== "rollouts") return;
    void readFacets();
    void reload(true);
  }, 500);
  return {
    changed: (which, kinds) => {
      if (which === id && kinds.includes("rollouts") && !state.q) grown();
    },
    move: (by) => table.move(by),
    open: () => table.open(),
    search: () => search.focus(),
    key: (key) => {
      if (key !== "s") return false;
      sideBySide = true;
      table.open();
      sideBySide = false;
      return true;
    },
    close: () => table.close(),
  };
}

/** Rollouts of the same draw, side by side. */
export function groupView(runId: string, rows: Row[], present: number): HTMLElement {
  const rewards = rows.map((r) => r.reward).filter((r): r is number => typeof r === "number");
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const [low, high] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const facts = ["advantage", "num_tokens", "num_turns", "staleness", "finish_reason", "engine_id"];
  return h(
    "div",
    {},
    h("p", { class: "muted" }, `${rows.length} rollouts of one prompt, mean reward ${num(mean, 3)}`),
    h(
      "div",
      { class: "side-by-side", tabindex: 0, role: "region", "aria-label": "Group side by side" },
      rows.map((r) =>
        h(
          "article",
          { class: `answer ${r.row === present ? "on" : ""}` },
          h("header", {}, h("a", { href: link("rollout", { run: runId, row: r.row }) }, `#${num(r.index)}`), rewardCell(r.reward, low, high), verdictCell(r)),
          h("dl", { class: "facts" }, facts.filter((f) => r[f] !== null && r[f] !== undefined).map((f) => h("div", {}, h("dt", {}, f), h("dd", {}, byName(f, r[f]))))),
          h("pre", { class: "text" }, String(r.text ?? "")),
        ),
      ),
    ),
  );
}
