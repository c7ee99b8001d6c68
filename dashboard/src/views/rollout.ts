// One rollout: its turns told apart, its tokens coloured by any column, its group.

import { api } from "../api";
import { css } from "../charts";
import type { Context, View } from "../context";
import { empty, h, replace, toast } from "../dom";
import { byName, num } from "../format";
import { textWithImages } from "../images";
import { current, go, link, remember } from "../router";
import { csv } from "../save";
import type { Rollout, Tokens, Turn } from "../types";
import { FILTERS, groupView, rewardCell, verdictCell } from "./rollouts";

const TABS = ["turns", "tokens", "group"] as const;
const FACTS = ["step", "index", "draw_id", "domain", "advantage", "num_tokens", "num_turns", "staleness", "finish_reason", "status", "engine_id", "reward_duration_s", "uid", "answer", "cause"];
const SIGNED = new Set(["difference", "advantage", "push", "kl", "returns"]);
const CATEGORIES = new Set(["mask", "policy_version", "clip"]);
const KINDS: Record<string, string> = { prompt: "prompt", model: "model", environment: "environment", tool: "tool" };
const SHOWN_TOKENS = 6000;

export async function rollout({ root, params, run, signal }: Context): Promise<View> {
  const row = Number(params.get("row") ?? NaN);
  if (!run || !Number.isInteger(row)) {
    root.append(empty("No such rollout", "The link names no row."));
    return {};
  }
  const data: Rollout = await api.rollout(run.id, row, signal);
  let tab = TABS.find((t) => t === params.get("tab")) ?? "turns";
  let tokens: Tokens | null = null;
  const panel = h("div", { class: "rollout-body", role: "tabpanel", id: "rollout-panel", tabindex: 0 });
  const buttons = TABS.map((name) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "rollout-panel", onclick: () => show(name) }, name === "turns" ? "Turns" : name === "tokens" ? "Tokens" : "Group"),
  );
  const state = Object.fromEntries([...FILTERS, "q", "sort", "desc"].map((key) => [key, params.get(key)]));
  const at = params.has("at") ? Number(params.get("at")) : null;
  /** The row before or after this one, in the order and with the filters of the table that it was opened from. */
  const step = (by: number) => async () => {
    if (at === null || at + by < 0) return;
    const answer = await api.rollouts(run.id, { ...state, offset: at + by, limit: 1 }, signal);
    const other = answer.rows[0];
    if (other) go("rollout", { ...state, run: run.id, row: other.row, at: at + by, tab: tab === "turns" ? null : tab, by: params.get("by") });
    else toast("This is the last one.");
  };
  const facts = FACTS.filter((f) => data[f] !== null && data[f] !== undefined && data[f] !== "");
  root.append(
    h(
      "div",
      { class: "rollout" },
      h(
        "header",
        { class: "rollout-head" },
        h("div", { class: "title-row" },
          h("h2", {}, `Rollout ${data.rollout_id}`),
          rewardCell(data.reward),
          verdictCell(data),
          h("span", { class: "grow" }),
          h("button", { type: "button", disabled: !at, onclick: step(-1), title: "Previous rollout (k)" }, "‹ Previous"),
          h("button", { type: "button", disabled: at === null, onclick: step(1), title: "Next rollout (j)" }, "Next ›"),
          h("a", { class: "button", href: link("rollouts", { ...state, run: run.id }) }, "All rollouts"),
        ),
        h("dl", { class: "facts" },
          facts.map((f) => h("div", {}, h("dt", {}, f), h("dd", {}, byName(f, data[f])))),
          Object.entries(data.components ?? {}).map(([name, value]) => h("div", { class: "component" }, h("dt", {}, `reward: ${name}`), h("dd", {}, num(value)))),
        ),
      ),
      h("div", { class: "tabs", role: "tablist", "aria-label": "Rollout" }, buttons),
      panel,
    ),
  );

  function show(name: (typeof TABS)[number]): void {
    tab = name;
    remember({ tab: name === "turns" ? null : name });
    TABS.forEach((t, i) => {
      buttons[i]?.setAttribute("aria-selected", String(t === name));
      buttons[i]?.setAttribute("tabindex", t === name ? "0" : "-1");
    });
    panel.setAttribute("aria-labelledby", `tab-${name}`);
    if (name === "turns") replace(panel, turnsView(run?.id ?? "", data));
    else if (name === "tokens") void showTokens();
    else void showGroup();
  }

  async function showGroup(): Promise<void> {
    try {
      replace(panel, groupView(run?.id ?? "", await api.group(run?.id ?? "", row, signal), row));
    } catch (error) {
      if (!signal.aborted) replace(panel, empty("No group", (error as Error).message));
    }
  }

  async function showTokens(): Promise<void> {
    try {
      tokens ??= await api.tokens(run?.id ?? "", row, signal);
    } catch (error) {
      if (!signal.aborted) replace(panel, empty("No tokens", (error as Error).message));
      return;
    }
    if (tab === "tokens") replace(panel, tokensView(tokens, data.turns ?? [], `${run?.name}-${data.rollout_id}`, current().params));
  }
  show(tab);

  return {
    move: (by) => void step(by)(),
    themed: () => show(tab),
    key: (key) => {
      if (key === "1" || key === "2" || key === "3") show(TABS[Number(key) - 1] as (typeof TABS)[number]);
      else if (key === "Backspace") history.back();
      else return false;
      return true;
    },
  };
}

function turnsView(run: string, data: Rollout): HTMLElement {
  const known = data.turns?.some((t) => t.kind !== "prompt" && t.text) ?? false;
  const turns: Turn[] = known && data.turns
    ? data.turns
    : [
        { kind: "prompt", text: String(data.prompt ?? ""), start: null, end: null },
        { kind: "model", text: String(data.text ?? ""), start: null, end: null },
      ];
  const shown = turns.flatMap((turn) => {
    if (turn.kind !== "prompt" || !data.messages?.length) return [{ ...turn, label: KINDS[turn.kind] ?? turn.kind }];
    return data.messages.map((m) => ({ ...turn, kind: "prompt", label: `prompt · ${m.role}`, text: m.content }));
  });
  const copy = async (text: string) => {
    await navigator.clipboard.writeText(text).then(() => toast("Copied"), () => toast("The browser does not let this page copy."));
  };
  return h(
    "ol",
    { class: "turns" },
    shown.map((turn) =>
      h(
        "li",
        { class: `turn kind-${KINDS[turn.kind] ?? "other"}` },
        h("header", {},
          h("span", { class: "kind" }, turn.label),
          turn.start !== null && turn.end !== null ? h("span", { class: "muted" }, `tokens ${num(turn.start)}–${num(turn.end)}`) : null,
          h("span", { class: "grow" }),
          h("button", { type: "button", "aria-label": `Copy this ${turn.label}`, onclick: () => void copy(turn.text) }, "copy"),
        ),
        textWithImages(run, turn.text || "(empty)", data.images ?? {}),
      ),
    ),
  );
}

/** A colour between the ends of a scale; `t` in [0, 1], or [-1, 1] where signed. Text on it stays readable. */
function colour(t: number, signed: boolean): string {
  const end = signed && t < 0 ? css("--scale-low") : css("--scale-high");
  return `color-mix(in oklab, ${end} ${Math.round(Math.min(1, Math.abs(t)) * Number(css("--strength")))}%, transparent)`;
}

interface Scale {
  paint: (value: number | null) => string;
  legend: HTMLElement;
}

/** Colours of a column: categories as they come, numbers between their 2nd and 98th of a hundred. */
function scaleOf(name: string, values: (number | null)[]): Scale {
  const seen = values.filter((v): v is number => v !== null);
  const distinct = [...new Set(seen)].sort((a, b) => a - b);
  if (CATEGORIES.has(name) && distinct.length <= 8) {
    const shade = (v: number) => `color-mix(in oklab, ${css(`--c${distinct.indexOf(v) % 8}`)} 42%, transparent)`;
    const text = (v: number) => (name === "mask" ? (v ? "1 trained" : "0 not trained") : name === "clip" ? (v ? `${num(v)} clipped` : "0 not clipped") : num(v));
    return {
      paint: (v) => (v === null ? "transparent" : shade(v)),
      legend: h("div", { class: "legend" }, distinct.map((v) => h("span", { class: "key" }, h("i", { style: { background: shade(v) } }), text(v)))),
    };
  }
  const sorted = [...seen].sort((a, b) => a - b);
  const at = (q: number) => sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] ?? 0;
  const [low, high] = [at(0.02), at(0.98)];
  const ratio = name === "ratio";
  const signed = SIGNED.has(name) || ratio;
  const reach = Math.max(Math.abs(low - (ratio ? 1 : 0)), Math.abs(high - (ratio ? 1 : 0))) || 1;
  const inverted = name.includes("logprob"); // unlikely tokens are what one looks for
  const place = (v: number) => {
    if (signed) return (v - (ratio ? 1 : 0)) / reach;
    const part = (v - low) / (high - low || 1);
    return Math.max(0, inverted ? 1 - part : part);
  };
  const stops = signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const ends = signed ? [(ratio ? 1 : 0) - reach, (ratio ? 1 : 0) + reach] : inverted ? [high, low] : [low, high];
  return {
    paint: (v) => (v === null ? "transparent" : colour(place(v), signed)),
    legend: h("div", { class: "legend" },
      h("span", {}, num(ends[0], 3)),
      h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${stops.map((s) => colour(s, signed)).join(", ")})` } }),
      h("span", {}, num(ends[1], 3)),
    ),
  };
}

function tokensView(data: Tokens, turns: Turn[], name: string, params: URLSearchParams): HTMLElement {
  const columns = Object.keys(data.columns);
  let by = columns.find((c) => c === params.get("by")) ?? columns.find((c) => c === "push") ?? columns.find((c) => c === "logprob") ?? columns[0] ?? "";
  const field = h("div", { class: "tokens", role: "group", "aria-label": "Tokens" });
  const legendBox = h("div", { class: "legend-box" });
  const detail = h("aside", { class: "token-detail", "aria-live": "off", "aria-label": "Numbers of a token" });
  const spans: HTMLElement[] = [];
  const count = Math.min(data.tokens.length, SHOWN_TOKENS);
  const bounds = new Map(turns.filter((t) => t.start !== null).map((t) => [t.start as number, t]));

  for (let i = 0; i < count; i += 1) {
    const turn = bounds.get(i);
    if (turn) field.append(h("div", { class: `turn-mark kind-${KINDS[turn.kind] ?? "other"}` }, turn.kind));
    const text = data.tokens[i] as string;
    const span = h("span", { class: "tok", "data-i": i }, visible(text));
    spans.push(span);
    field.append(span);
    if (text.includes("\n")) field.append(h("br"));
  }

  function inspect(i: number): void {
    spans.forEach((s, j) => s.classList.toggle("on", j === i));
    replace(
      detail,
      h("h3", {}, h("code", {}, visible(data.tokens[i] as string))),
      h("dl", { class: "facts column" },
        h("div", {}, h("dt", {}, "position"), h("dd", {}, num(i))),
        h("div", {}, h("dt", {}, "token id"), h("dd", {}, num(data.token_ids[i]))),
        columns.map((c) => h("div", { class: c === by ? "on" : "" }, h("dt", {}, c), h("dd", {}, num(data.columns[c]?.[i] ?? null, 5)))),
      ),
    );
  }
  field.addEventListener("pointerover", (event) => {
    const i = (event.target as HTMLElement).dataset?.i;
    if (i !== undefined) inspect(Number(i));
  });
  field.addEventListener("click", (event) => {
    const i = (event.target as HTMLElement).dataset?.i;
    if (i !== undefined) inspect(Number(i));
  });
  let cursor = -1;
  field.tabIndex = 0;
  field.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    cursor = Math.max(0, Math.min(count - 1, cursor + move));
    inspect(cursor);
    spans[cursor]?.scrollIntoView({ block: "nearest" });
  });

  function paint(): void {
    const values = data.columns[by] ?? [];
    const scale = scaleOf(by, values);
    spans.forEach((span, i) => (span.style.backgroundColor = scale.paint(values[i] ?? null)));
    replace(legendBox, by ? scale.legend : null);
  }

  const choose = h("div", { class: "segmented wrap", role: "group", "aria-label": "Colour by" }, columns.map((c) =>
    h("button", {
      type: "button",
      "aria-pressed": String(c === by),
      onclick: (e: Event) => {
        by = c;
        remember({ by });
        choose.querySelectorAll("button").forEach((b) => b.setAttribute("aria-pressed", String(b === e.currentTarget)));
        paint();
      },
    }, c),
  ));
  paint();
  if (data.tokens.length) inspect(0);
  const missing = Object.entries(data.missing ?? {});
  const save = () => csv(`${name}-tokens`, ["position", "token", "token_id", ...columns], data.tokens.map((t, i) => [i, t, data.token_ids[i], ...columns.map((c) => data.columns[c]?.[i] ?? null)]));
  return h("div", { class: "token-view" },
    h("div", { class: "tools" }, h("span", { class: "muted" }, "colour by"), choose, legendBox, h("span", { class: "grow" }), h("button", { type: "button", onclick: save }, "CSV")),
    missing.length ? h("details", { class: "missing" }, h("summary", {}, `Not recorded: ${missing.map(([c]) => c).join(", ")}`), h("dl", {}, missing.map(([c, why]) => h("div", {}, h("dt", {}, c), h("dd", {}, why))))) : null,
    data.tokens.length ? null : empty("No tokens", "This rollout wrote nothing."),
    h("div", { class: "token-split" }, field, detail),
    data.tokens.length > count ? h("p", { class: "muted" }, `The first ${num(count)} of ${num(data.tokens.length)} tokens; the CSV has all.`) : null,
  );
}

/** White space that would be invisible, made visible. */
function visible(text: string): string {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll("\r", "␍") || "∅";
}
