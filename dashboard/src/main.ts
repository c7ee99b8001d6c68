// The page: the bar, the routes, keys, the theme, and what is live.

import { api, listen } from "./api";
import type { Opener, View } from "./context";
import { empty, h, replace, toast } from "./dom";
import { current, go, link } from "./router";
import type { RunInfo } from "./types";
import { answers } from "./views/answers";
import { health } from "./views/health";
import { overview } from "./views/overview";
import { plan } from "./views/plan";
import { rollout } from "./views/rollout";
import { rollouts } from "./views/rollouts";
import { time } from "./views/time";

const VIEWS: Record<string, { title: string; open: Opener; tab?: string; key?: string }> = {
  overview: { title: "Overview", open: overview, tab: "overview", key: "o" },
  answers: { title: "Answers", open: answers, tab: "answers", key: "a" },
  rollouts: { title: "Rollouts", open: rollouts, tab: "rollouts", key: "r" },
  rollout: { title: "Rollout", open: rollout },
  time: { title: "Time", open: time, tab: "time", key: "t" },
  health: { title: "Health", open: health, tab: "health", key: "h" },
  plan: { title: "Plan", open: plan, tab: "plan", key: "p" },
};

const KEYS: [string, string][] = [
  ["?", "this list"],
  ["/", "search"],
  ["j k", "next and previous row or rollout"],
  ["Enter", "open the row"],
  ["s", "the row's group side by side"],
  ["1 2 3", "turns, tokens, group of a rollout"],
  ["g o", "overview"],
  ["g a", "answers"],
  ["g r", "rollouts"],
  ["g t", "time"],
  ["g h", "health"],
  ["g p", "plan"],
  ["[ ]", "previous and next run"],
  ["l", "log scale"],
  ["x", "steps or time"],
  ["+ − 0", "zoom in, out, whole run (Time)"],
  ["d", "dark or light"],
  ["y", "copy a link to what is shown"],
];

let runs: RunInfo[] = [];
let view: View = {};
let abort = new AbortController();
let stops: (() => void)[] = [];
let lastRun = "";

// theme --------------------------------------------------------------------------------------------------------------
const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = () => {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
};
function theme(choice: string | null): void {
  const isDark = choice ? choice === "dark" : dark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  themeButton.setAttribute("aria-pressed", String(isDark));
  view.themed?.();
}
function switchTheme(): void {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("theme", next);
  } catch {
    // A browser that keeps nothing still switches.
  }
  theme(next);
}

// the bar ------------------------------------------------------------------------------------------------------------
const nav = h("nav", { class: "nav", "aria-label": "Views" });
const picker = h("select", { class: "picker", "aria-label": "Run", onchange: () => pick(picker.value) });
const live = h("span", { class: "live", role: "status" });
const themeButton = h("button", { type: "button", class: "icon", "aria-label": "Dark theme", title: "Dark or light (d)", onclick: switchTheme }, "◐");
const main = h("main", { id: "main", tabindex: -1 });
document.body.append(
  h("a", { class: "skip", href: "#main", onclick: (e: Event) => { e.preventDefault(); main.focus(); } }, "To the content"),
  h("header", { class: "bar" },
    h("a", { class: "brand", href: "#/overview", "aria-label": "ROLL, overview" }, h("span", { class: "mark", "aria-hidden": "true" }), h("span", {}, "ROLL")),
    nav,
    h("span", { class: "grow" }),
    live,
    picker,
    themeButton,
    h("button", { type: "button", class: "icon", "aria-label": "Keys", title: "Keys (?)", onclick: showKeys }, "?"),
  ),
  main,
);

function pick(id: string): void {
  lastRun = id;
  const { view: name } = current();
  go(name === "rollout" || name === "overview" ? "rollouts" : name, { run: id });
}

function drawBar(name: string, run: RunInfo | null): void {
  replace(nav, Object.entries(VIEWS).filter(([, v]) => v.tab).map(([key, v]) => {
    const here = key === name || (key === "rollouts" && name === "rollout");
    return h("a", { href: key === "overview" ? overviewLink() : link(key, { run: run?.id }), "aria-current": here ? "page" : null }, v.title);
  }));
  replace(picker, runs.map((r) => h("option", { value: r.id, selected: r.id === run?.id }, r.name)));
  picker.hidden = name === "overview" || runs.length === 0;
  const running = runs.filter((r) => r.status === "running").length;
  live.className = `live ${running ? "on" : ""}`;
  live.textContent = running ? `${running} running` : "";
}

let overviewHash = "";
const overviewLink = () => overviewHash || "#/overview";

// routes -------------------------------------------------------------------------------------------------------------
async function open(): Promise<void> {
  const { view: name, params } = current();
  const entry = VIEWS[name];
  abort.abort();
  abort = new AbortController();
  const signal = abort.signal;
  stops.splice(0).forEach((stop) => stop());
  view.close?.();
  view = {};
  const wanted = params.get("run") ?? lastRun;
  const run = runs.find((r) => r.id === wanted) ?? runs.find((r) => r.status === "running") ?? runs.find((r) => r.status !== "unreadable") ?? null;
  if (run) lastRun = run.id;
  document.title = `${entry?.title ?? "ROLL"}${run && name !== "overview" ? ` · ${run.name}` : ""} · ROLL`;
  drawBar(name, run);
  const root = h("div", { class: `view view-${entry ? name : "none"}` }, h("h1", { class: "hidden" }, entry?.title ?? "ROLL"));
  replace(main, root);
  scrollTo(0, 0);
  if (!entry) {
    root.append(empty("No such view", "The link names a view that this page does not have."));
    return;
  }
  if (params.get("run") && !runs.some((r) => r.id === params.get("run"))) {
    root.append(empty("No such run", "The link names a run that was not given to this dashboard."));
    return;
  }
  root.setAttribute("aria-busy", "true");
  try {
    const opened = await entry.open({ root, params, runs, run, signal, reopen: () => void open() });
    if (signal.aborted) opened.close?.();
    else view = opened;
  } catch (error) {
    if (!signal.aborted) root.append(empty("This could not be shown", (error as Error).message));
  }
  root.removeAttribute("aria-busy");
  if (!signal.aborted) watch(name === "overview" ? runs : run ? [run] : []);
}

/** Listens to runs that still grow (browsers allow six connections to a server, so at most four). */
function watch(which: RunInfo[]): void {
  for (const run of which.filter((r) => r.status === "running").slice(0, 4)) {
    stops.push(
      listen(run.id, (kinds) => {
        live.classList.remove("beat");
        requestAnimationFrame(() => live.classList.add("beat"));
        view.changed?.(run.id, kinds);
      }, (isLive) => live.classList.toggle("lost", !isLive)),
    );
  }
}

// keys ---------------------------------------------------------------------------------------------------------------
let afterG = false;
function showKeys(): void {
  document.querySelector("dialog")?.remove();
  const dialog = h("dialog", { class: "keys", "aria-labelledby": "keys-title" },
    h("h2", { id: "keys-title" }, "Keys"),
    h("dl", {}, KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, keys.split(" ").map((k) => h("kbd", {}, k))), h("dd", {}, what)))),
    h("p", {}, h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  );
  dialog.addEventListener("click", (e) => e.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function otherRun(by: number): void {
  if (!runs.length) return;
  const at = runs.findIndex((r) => r.id === lastRun);
  pick((runs[(at + by + runs.length) % runs.length] as RunInfo).id);
}

const COMMANDS: Record<string, () => void> = {
  "?": showKeys,
  d: switchTheme,
  "[": () => otherRun(-1),
  "]": () => otherRun(1),
  y: () => void navigator.clipboard?.writeText(location.href).then(() => toast("Link copied"), () => toast("The browser does not let this page copy.")),
};

addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (target.matches("input:not([type=range]):not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const key = event.key;
  if (afterG) {
    afterG = false;
    const found = Object.entries(VIEWS).find(([, v]) => v.key === key);
    if (found) {
      event.preventDefault();
      location.hash = found[0] === "overview" ? overviewLink() : link(found[0], { run: lastRun });
      return;
    }
  }
  if (key === "g") afterG = true;
  else if (key === "/") {
    if (!view.search) return;
    view.search();
  } else if (key === "j" || key === "k") view.move?.(key === "j" ? 1 : -1);
  else if (key === "Enter" && !target.closest("button, a, summary, [tabindex='0']")) view.open?.();
  else if (view.key?.(key)) {
    // The view took it.
  } else if (COMMANDS[key]) COMMANDS[key]();
  else return;
  event.preventDefault();
});

async function start(): Promise<void> {
  theme(stored());
  dark.addEventListener("change", () => theme(stored()));
  addEventListener("hashchange", (event) => {
    if (new URL(event.oldURL).hash.startsWith("#/overview")) overviewHash = new URL(event.oldURL).hash;
    void open();
  });
  try {
    runs = await api.runs();
  } catch (error) {
    replace(main, empty("The runs cannot be read", (error as Error).message));
    return;
  }
  await open();
  setInterval(() => {
    if (document.hidden) return;
    void api.runs().then((fresh) => {
      const same = fresh.length === runs.length && fresh.every((r, i) => r.id === runs[i]?.id && r.status === runs[i]?.status);
      fresh.forEach((r, i) => (runs[i] = r));
      runs.length = fresh.length;
      if (!same) void (current().view === "overview" ? open() : drawBar(current().view, runs.find((r) => r.id === lastRun) ?? null));
    }, () => live.classList.add("lost"));
  }, 15_000);
}
void start();
