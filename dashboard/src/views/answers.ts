// What people ask of a run: each question with its answer, its figures, and where to look.

import { api } from "../api";
import type { Context, View } from "../context";
import { empty, h, replace } from "../dom";
import { num } from "../format";
import { link } from "../router";
import type { Answer } from "../types";

const FIRST_LINKS = 8;
/** Between two answers about a run that grows: all of its ledger and index are looked at. */
const REST_MS = 10_000;

export async function answers({ root, run, signal }: Context): Promise<View> {
  if (!run) {
    root.append(empty("No run", "There is no run to ask about."));
    return {};
  }
  const id = run.id;
  const body = h("div", { class: "answers" });
  root.append(body);

  function card(a: Answer): HTMLElement {
    const links = a.links.map((l) => h("a", { class: "button", href: link(l.view, l.view === "overview" ? l.params : { run: id, ...l.params }) }, l.text));
    const more = links.slice(FIRST_LINKS);
    return h("section", { class: `panel answer-card ${a.tone}`, id: `answer-${a.id}`, "aria-label": a.question },
      h("h2", {}, a.question),
      h("p", { class: "said" }, a.answer),
      a.figures.length ? h("dl", { class: "facts" }, a.figures.map((f) => h("div", {}, h("dt", {}, f.name), h("dd", {}, typeof f.value === "number" ? num(f.value, 4) : f.value)))) : null,
      h("div", { class: "answer-links" }, links.slice(0, FIRST_LINKS), more.length ? h("details", {}, h("summary", {}, `${more.length} more`), h("div", { class: "answer-links" }, more)) : null),
    );
  }

  async function draw(): Promise<void> {
    try {
      const data = await api.answers(id, signal);
      const left = data.indexing?.files_left;
      replace(body, left ? h("p", { class: "muted", role: "status" }, `${num(left)} files of rollouts are still to be read: answers about them change.`) : null, data.answers.map(card));
      if (data.indexing) setTimeout(() => !signal.aborted && void draw(), 300);
    } catch (error) {
      if (!signal.aborted) replace(body, empty("No answers", (error as Error).message));
    }
  }
  await draw();
  let waiting = 0;
  return {
    changed: (which) => {
      if (which !== id || waiting) return;
      waiting = window.setTimeout(() => {
        waiting = 0;
        void draw();
      }, REST_MS);
    },
    close: () => clearTimeout(waiting),
  };
}
