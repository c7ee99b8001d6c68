// Is the run well? Alarms with their rows, what became of every draw, syncs, memory, failures.

import { api } from "../api";
import { Chart, palette } from "../charts";
import type { Context, View } from "../context";
import { debounce, empty, h, replace } from "../dom";
import { byName, bytes, num, plain } from "../format";
import { link } from "../router";
import { csv } from "../save";
import type { Health } from "../types";

const FATES: Record<string, number> = { trained: 2, filtered: 3, expired: 7, failed: 1, in_flight: 0 };

export async function health({ root, params, run, signal }: Context): Promise<View> {
  if (!run) {
    root.append(empty("No run", "There is no run to show the health of."));
    return {};
  }
  const body = h("div", { class: "health" });
  root.append(body);
  const charts: Chart[] = [];
  const name = run.name;

  function section(title: string, note: string, content: Node | null, save?: () => void): HTMLElement {
    return h("section", { class: "panel", "aria-label": title },
      h("header", { class: "panel-head" }, h("h2", {}, title), h("span", { class: "muted" }, note), h("span", { class: "grow" }), save ? h("button", { type: "button", onclick: save, "aria-label": `Save ${title} as CSV` }, "CSV") : null),
      content,
    );
  }

  function table(label: string, columns: string[], rows: unknown[][]): HTMLElement {
    return h("div", { class: "scroll-x tall", tabindex: 0, role: "region", "aria-label": `${label}, table` },
      h("table", { class: "plain" },
        h("thead", {}, h("tr", {}, columns.map((c, i) => h("th", { scope: "col", class: typeof rows[0]?.[i] === "number" ? "num" : "" }, c)))),
        h("tbody", {}, rows.map((row) => h("tr", {}, row.map((v, i) => h("td", { class: typeof v === "number" ? "num" : "" }, v instanceof Node ? v : typeof v === "object" ? plain(v) : byName(columns[i] ?? "", v)))))),
      ),
    );
  }

  function alarms(data: Health): HTMLElement {
    const list = data.alarms ?? [];
    return section("Alarms", list.length ? `${list.length}` : "", list.length
      ? h("ul", { class: "alarms" }, list.map((a) => h("li", {},
          h("span", { class: "tag bad" }, a.alarm),
          h("span", { class: "muted" }, a.step === null ? "" : `step ${num(a.step)}`),
          h("p", {}, a.message),
          h("span", { class: "rows" },
            (a.rows ?? []).slice(0, 8).map((row, i) => h("a", { href: link("rollout", { run: run?.id, row }) }, `rollout ${i + 1}`)),
            a.step !== null ? h("a", { href: link("rollouts", { run: run?.id, step_min: a.step, step_max: a.step }) }, "rollouts of this step") : null,
          ))))
      : h("p", { class: "fine" }, "✓ None. Nothing unusual was seen."));
  }

  function ledger(data: Health): HTMLElement {
    const fates = Object.entries(data.ledger?.fates ?? {});
    const total = fates.reduce((sum, [, n]) => sum + n, 0);
    const colours = palette();
    const colour = (fate: string) => colours[FATES[fate] ?? 4] as string;
    const bySteps = data.ledger?.by_step ?? [];
    const keys = [...new Set(bySteps.flatMap((s) => Object.keys(s)))];
    const reasons = Object.entries(data.ledger?.reasons ?? {}).sort((a, b) => b[1] - a[1]);
    const plot = h("div", { class: "plot" });
    if (bySteps.length > 1) {
      queueMicrotask(() => {
        const curves = keys.filter((k) => k !== "step").map((k) => ({ label: k, colour: colour(k), x: bySteps.map((s) => s.step ?? null), y: bySteps.map((s) => s[k] ?? null) }));
        charts.push(new Chart(plot, curves, { title: "ledger", axis: "step", log: false, smoothing: 0, height: 150 }));
      });
    }
    return section("Ledger", total ? `what became of ${num(total)} draws` : "", total
      ? h("div", {},
          h("div", { class: "stack", "aria-hidden": "true" }, fates.map(([fate, n]) => h("i", { style: { width: `${(n / total) * 100}%`, background: colour(fate) } }))),
          h("dl", { class: "facts big" }, fates.map(([fate, n]) => h("div", {}, h("dt", {}, h("i", { class: "swatch", vars: { "--run": colour(fate) } }), fate), h("dd", {}, num(n), h("small", {}, ` ${((n / total) * 100).toFixed(1)} %`))))),
          reasons.length ? table("Reasons", ["why", "draws"], reasons.map(([why, n]) => [why, n])) : null,
          plot)
      : empty("No draws yet"),
      () => csv(`${name}-ledger`, keys, bySteps.map((s) => keys.map((k) => s[k] ?? null))));
  }

  function records(title: string, rows: Record<string, unknown>[], none: string): HTMLElement {
    const columns = [...new Set(rows.flatMap((r) => Object.keys(r)))];
    return section(title, rows.length ? `${rows.length}` : "", rows.length ? table(title, columns, rows.slice(-500).map((r) => columns.map((c) => r[c] ?? null))) : h("p", { class: "fine" }, none),
      () => csv(`${name}-${title.toLowerCase()}`, columns, rows.map((r) => columns.map((c) => r[c]))));
  }

  function memory(data: Health): HTMLElement {
    const curves = Object.entries(data.memory ?? {}).map(([label, v], i) => ({
      label,
      colour: palette()[i % 8] as string,
      x: v.steps,
      y: v.bytes.map((b) => (b === null ? null : b / 2 ** 30)),
    }));
    const plot = h("div", { class: "plot" });
    if (curves.length) queueMicrotask(() => charts.push(new Chart(plot, curves, { title: "memory, GiB", axis: "step", log: false, smoothing: 0, height: 180 })));
    const peaks = curves.map((c) => h("div", {}, h("dt", {}, h("i", { class: "swatch", vars: { "--run": c.colour } }), c.label), h("dd", {}, bytes(Math.max(...c.y.map((v) => v ?? 0)) * 2 ** 30), h("small", {}, " at most"))));
    return section("Memory", "GiB over steps", peaks.length ? h("div", {}, h("dl", { class: "facts big" }, peaks), plot) : empty("Nothing recorded"),
      () => csv(`${name}-memory`, ["name", "step", "gib"], curves.flatMap((c) => c.x.map((x, i) => [c.label, x, c.y[i]]))));
  }

  async function draw(): Promise<void> {
    let data: Health;
    try {
      data = await api.health(run?.id ?? "", signal);
    } catch (error) {
      if (!signal.aborted) replace(body, empty("Nothing to say", (error as Error).message));
      return;
    }
    const scroll = scrollY;
    charts.splice(0).forEach((c) => c.close());
    const log = data.log_tail ?? [];
    replace(
      body,
      h("div", { class: "stacked" }, alarms(data), records("Failures", (data.failures ?? []) as unknown as Record<string, unknown>[], "✓ No infrastructure failed.")),
      h("div", { class: "stacked" }, ledger(data), memory(data)),
      records("Syncs", data.syncs ?? [], "No weights were brought to engines yet."),
      section("Log", "its last lines", log.length ? h("pre", { class: "log", tabindex: 0, role: "region", "aria-label": "Log, lines" }, log.map((l) => plain(l)).join("\n")) : empty("Empty")),
    );
    scrollTo(0, scroll);
    if (data.indexing) soon(data.indexing.files_left);
  }
  /** Alarms and failures name rows of rollouts, so they are whole once all files of rollouts were read. */
  function soon(filesLeft: number): void {
    body.prepend(h("p", { class: "muted padded", role: "status" }, `${num(filesLeft)} files of rollouts are still to read`));
    setTimeout(() => !signal.aborted && void draw(), 300);
  }
  await draw();
  const asked = params.get("show");
  if (asked) requestAnimationFrame(() => [...body.querySelectorAll("section")].find((s) => s.getAttribute("aria-label") === asked)?.scrollIntoView());
  const grown = debounce(() => void draw(), 1000);
  return {
    changed: (which) => {
      if (which === run.id) grown();
    },
    themed: () => void draw(),
    close: () => charts.forEach((c) => c.close()),
  };
}
