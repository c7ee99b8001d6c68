// Elements without HTML: every text goes through a text node, so that no rollout, name or message is ever parsed as markup.

type Child = Node | string | number | null | undefined | false | Child[];
type Props = Record<string, unknown>;

function fill(node: Element, children: Child[]): void {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) fill(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

function assign(node: Element, props: Props): void {
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value as EventListener);
    else if (key === "style") Object.assign((node as HTMLElement).style, value);
    else if (key === "vars") {
      for (const [name, v] of Object.entries(value as Props)) (node as HTMLElement).style.setProperty(name, String(v));
    } else if (key === "value" && "value" in node) (node as HTMLInputElement).value = String(value);
    else if (key === "checked") (node as HTMLInputElement).checked = Boolean(value);
    else node.setAttribute(key === "class" ? "class" : key, value === true ? "" : String(value));
  }
}

/** An element; `on…` props are listeners, `vars` are CSS variables. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  fill(node, children);
  assign(node, props);
  return node;
}

/** An element of SVG. */
export function svg(tag: string, props: Props = {}, ...children: Child[]): SVGElement {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  fill(node, children);
  assign(node, props);
  return node;
}

export function replace(node: Element, ...children: Child[]): void {
  node.textContent = "";
  fill(node, children);
}

/** Calls `fn` once, `ms` after the last call. */
export function debounce<A extends unknown[]>(fn: (...args: A) => void, ms: number): (...args: A) => void {
  let timer = 0;
  return (...args: A) => {
    clearTimeout(timer);
    timer = window.setTimeout(() => fn(...args), ms);
  };
}

let toastTimer = 0;
/** A short message, which screen readers hear too. */
export function toast(text: string): void {
  let box = document.querySelector<HTMLElement>(".toast");
  if (!box) {
    box = h("div", { class: "toast", role: "status", "aria-live": "polite" });
    document.body.append(box);
  }
  box.textContent = text;
  box.classList.add("on");
  clearTimeout(toastTimer);
  toastTimer = window.setTimeout(() => box.classList.remove("on"), 2500);
}

/** What stands where nothing is to be shown, and why. */
export function empty(title: string, detail = "", ...more: Child[]): HTMLElement {
  return h("div", { class: "empty" }, h("strong", {}, title), detail ? h("p", {}, detail) : null, ...more);
}
