// What was predicted before the run, beside what came.

import { api } from "../api";
import type { Context, View } from "../context";
import { empty, h } from "../dom";
import { byName, num, plain } from "../format";
import { csv } from "../save";
import type { PlanItem } from "../types";

export async function plan({ root, run, signal }: Context): Promise<View> {
  if (!run) {
    root.append(empty("No run", "There is no run to show a plan of."));
    return {};
  }
  const id = run.id;
  const [answer, config] = await Promise.all([api.plan(id, signal), api.config(id, signal).catch(() => null)]);
  const items = answer.items ?? [];
  const measured = await measurements(id, items, signal);
  root.append(
    h("div", { class: "plan" },
      items.length ? items.map((item) => draw(item, measured)) : h("section", { class: "panel" }, empty("No plan beside this run", answer.problem ?? "Make one with `roll plan` or `roll simulate`.")),
      config ? configuration(run.name, config.text, config.values) : null,
    ),
  );
  return {};
}

/** Means of the metrics that plans predict, over the run's steps. */
async function measurements(id: string, items: PlanItem[], signal: AbortSignal): Promise<Map<string, number>> {
  const names = [...new Set(items.flatMap((i) => Object.keys(i.predicted ?? {})))];
  const found = new Map<string, number>();
  if (!names.length) return found;
  const answer = await api.series(id, names, "train", true, signal).catch(() => null);
  for (const name of names) {
    const values = (answer?.series[name] ?? []).filter((v): v is number => v !== null);
    if (values.length) found.set(name, values.reduce((a, b) => a + b, 0) / values.length);
  }
  return found;
}

function draw(item: PlanItem, measured: Map<string, number>): HTMLElement {
  const predicted = Object.entries(item.predicted ?? {});
  const t = item.table;
  return h("section", { class: "panel", "aria-label": item.name },
    h("header", { class: "panel-head" }, h("h2", {}, item.name), h("span", { class: "tag" }, item.kind ?? "plan"), h("span", { class: "grow" }), t ? h("button", { type: "button", onclick: () => csv(item.name, t.columns, t.rows) }, "CSV") : null),
    predicted.length ? tableOf(["metric", "predicted", "measured", "measured / predicted"], predicted.map(([n, p]) => {
      const m = measured.get(n) ?? null;
      return [n, p, m, m !== null && p ? m / p : null];
    })) : null,
    t ? tableOf(t.columns, t.rows) : null,
    item.values ? h("dl", { class: "facts" }, Object.entries(item.values).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, typeof v === "object" ? plain(v) : byName(k, v))))) : null,
    item.text ? h("pre", { class: "log" }, item.text) : null,
  );
}

function tableOf(columns: string[], rows: unknown[][]): HTMLElement {
  return h("div", { class: "scroll-x", tabindex: 0, role: "region", "aria-label": columns.join(", ") },
    h("table", { class: "plain" },
      h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col" }, c)))),
      h("tbody", {}, rows.map((r) => h("tr", {}, r.map((v) => h("td", { class: typeof v === "number" ? "num" : "" }, typeof v === "object" ? plain(v) : num(v))))))));
}

function configuration(name: string, text: string, values: Record<string, unknown>): HTMLElement {
  return h("section", { class: "panel", "aria-label": "Configuration" },
    h("header", { class: "panel-head" }, h("h2", {}, "Configuration"), h("span", { class: "muted" }, "as it was resolved"), h("span", { class: "grow" }), h("button", { type: "button", "aria-label": "Save Configuration as CSV", onclick: () => csv(`${name}-configuration`, ["key", "value"], Object.entries(values)) }, "CSV")),
    h("pre", { class: "log tall", tabindex: 0, role: "region", "aria-label": "Configuration, text" }, text),
  );
}
