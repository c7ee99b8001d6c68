// A table of any length: only the rows in sight exist, and only the windows around them are fetched.
//
//     scroll position ─► first row in sight ─► windows of 200 rows ─► fetched once, kept, drawn when they come
//
// Browsers cannot place an element of a million rows' height, so beyond `MAX_HEIGHT` the scroll bar is a scale
// of the whole, and the wheel and the keys move by rows.

import { h, replace } from "./dom";

export interface Column<R> {
  key: string;
  title: string;
  width: number;
  numeric?: boolean;
  grow?: boolean;
  sortable?: boolean;
  cell: (row: R) => Node | string;
}

const ROW_HEIGHT = 30;
const WINDOW = 200;
const MAX_HEIGHT = 6_000_000;
const KEPT_WINDOWS = 60;

export interface TableOptions<R> {
  label: string;
  columns: Column<R>[];
  fetch: (offset: number, limit: number) => Promise<R[]>;
  onOpen: (row: R, index: number) => void;
  onSort?: (key: string) => void;
  onSelect?: (row: R) => void;
  sort?: { key: string; descending: boolean };
}

export class VirtualTable<R> {
  readonly root: HTMLElement;
  selected = -1;
  private readonly head: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly spacer: HTMLElement;
  private readonly body: HTMLElement;
  private total = 0;
  private top = 0;
  private moved = false;
  private windows = new Map<number, R[] | "pending">();
  private generation = 0;
  private frame = 0;
  private timer = 0;
  private readonly observer: ResizeObserver;

  constructor(private options: TableOptions<R>) {
    this.head = h("div", { class: "vt-head", role: "row" });
    this.body = h("div", { class: "vt-body", role: "rowgroup" });
    this.spacer = h("div", { class: "vt-spacer", role: "presentation" });
    const head = h("div", { role: "rowgroup", class: "vt-headbox" }, this.head);
    this.scroller = h("div", { class: "vt-scroll", tabindex: 0, role: "grid", "aria-label": options.label }, head, this.spacer, this.body);
    this.root = h("div", { class: "vt" }, this.scroller);
    this.scroller.addEventListener("scroll", () => this.onScroll(), { passive: true });
    this.scroller.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    this.scroller.addEventListener("keydown", (e) => this.onKey(e));
    this.observer = new ResizeObserver(() => this.schedule());
    this.observer.observe(this.scroller);
    this.drawHead();
  }

  close(): void {
    this.observer.disconnect();
    clearTimeout(this.timer);
    this.generation += 1;
  }

  /** Says how many rows there are and where they come from, and forgets what was fetched. */
  reset(total: number, first: R[] = [], keepPosition = false): void {
    this.generation += 1;
    this.windows.clear();
    for (let i = 0; i * WINDOW < first.length; i += 1) {
      const part = first.slice(i * WINDOW, (i + 1) * WINDOW);
      if (part.length === WINDOW || i * WINDOW + part.length >= total) this.windows.set(i, part);
    }
    this.total = total;
    if (!keepPosition) this.top = 0;
    if (!keepPosition || this.selected < 0) this.selected = total ? 0 : -1;
    this.selected = Math.min(this.selected, total - 1);
    this.top = Math.min(this.top, this.maxTop());
    this.spacer.style.height = `${Math.min(total * ROW_HEIGHT, MAX_HEIGHT)}px`;
    this.scroller.setAttribute("aria-rowcount", String(total + 1));
    this.place();
    this.schedule();
  }

  setSort(key: string, descending: boolean): void {
    this.options.sort = { key, descending };
    this.drawHead();
  }

  move(by: number): void {
    this.select(Math.max(0, Math.min(this.total - 1, (this.selected < 0 ? 0 : this.selected) + by)));
  }

  open(): void {
    const row = this.at(this.selected);
    if (row) this.options.onOpen(row, this.selected);
  }

  private select(index: number): void {
    this.selected = index;
    const visible = this.visible();
    if (index < this.top) this.top = index;
    else if (index > this.top + visible - 2) this.top = index - visible + 2;
    this.top = Math.max(0, Math.min(this.top, this.maxTop()));
    this.place();
    this.schedule();
    const row = this.at(index);
    if (row) this.options.onSelect?.(row);
  }

  private at(index: number): R | undefined {
    const rows = this.windows.get(Math.floor(index / WINDOW));
    return Array.isArray(rows) ? rows[index % WINDOW] : undefined;
  }

  private visible(): number {
    return Math.ceil(this.room() / ROW_HEIGHT);
  }

  private maxTop(): number {
    return Math.max(0, this.total - this.room() / ROW_HEIGHT);
  }

  /** Pixels for rows, below the head. */
  private room(): number {
    return Math.max(0, this.scroller.clientHeight - ROW_HEIGHT);
  }

  private scrollable(): number {
    return this.spacer.offsetHeight - this.room();
  }

  private scaled(): boolean {
    return this.total * ROW_HEIGHT > MAX_HEIGHT;
  }

  /** Moves the scroll bar to where `top` is. */
  private place(): void {
    const wanted = this.scaled() ? (this.top / (this.maxTop() || 1)) * this.scrollable() : this.top * ROW_HEIGHT;
    if (Math.abs(this.scroller.scrollTop - wanted) >= 1) {
      this.moved = true;
      this.scroller.scrollTop = wanted;
    }
  }

  private onScroll(): void {
    if (this.moved) this.moved = false;
    else if (this.scaled()) {
      this.top = Math.min(1, this.scroller.scrollTop / (this.scrollable() || 1)) * this.maxTop();
    } else this.top = this.scroller.scrollTop / ROW_HEIGHT;
    this.schedule();
  }

  private onWheel(event: WheelEvent): void {
    if (!this.scaled() || Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
    event.preventDefault();
    const rows = event.deltaMode === 1 ? event.deltaY : event.deltaY / ROW_HEIGHT;
    this.top = Math.max(0, Math.min(this.maxTop(), this.top + rows));
    this.place();
    this.schedule();
  }

  private onKey(event: KeyboardEvent): void {
    const page = Math.max(1, this.visible() - 2);
    const steps: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.total, End: this.total };
    const by = steps[event.key];
    if (by !== undefined) {
      event.preventDefault();
      this.move(by);
    } else if (event.key === "Enter") this.open();
  }

  private template(): string {
    return this.options.columns.map((c) => (c.grow ? `minmax(${c.width}px, 1fr)` : `${c.width}px`)).join(" ");
  }

  private drawHead(): void {
    const { columns, sort, onSort } = this.options;
    this.root.style.setProperty("--columns", this.template());
    this.root.style.setProperty("--width", `${columns.reduce((sum, c) => sum + c.width, 0)}px`);
    replace(
      this.head,
      columns.map((column) => {
        const sorted = sort?.key === column.key;
        const direction = sorted ? (sort.descending ? "descending" : "ascending") : "none";
        const classes = `vt-cell${column.numeric ? " num" : ""}`;
        if (!column.sortable || !onSort) return h("div", { class: classes, role: "columnheader" }, column.title);
        const arrow = sorted ? (sort.descending ? " ↓" : " ↑") : "";
        return h(
          "div",
          { class: classes, role: "columnheader", "aria-sort": direction },
          h("button", { type: "button", class: `sorter${sorted ? " on" : ""}`, onclick: () => onSort(column.key) }, column.title + arrow),
        );
      }),
    );
  }

  private schedule(): void {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  private draw(): void {
    const first = Math.floor(this.top);
    const last = Math.min(this.total, first + this.visible() + 1);
    const shift = this.scroller.scrollTop - (this.top - first) * ROW_HEIGHT;
    this.body.style.transform = `translateY(${shift}px)`;
    const rows: HTMLElement[] = [];
    for (let i = first; i < last; i += 1) rows.push(this.row(i));
    replace(this.body, rows);
    if (this.selected >= first && this.selected < last) this.scroller.setAttribute("aria-activedescendant", `row-${this.selected}`);
    else this.scroller.removeAttribute("aria-activedescendant");
    const wanted = new Set<number>();
    for (let i = first; i < last; i += 1) wanted.add(Math.floor(i / WINDOW));
    if ([...wanted].some((w) => !this.windows.has(w))) {
      clearTimeout(this.timer);
      this.timer = window.setTimeout(() => wanted.forEach((w) => void this.load(w)), 40);
    }
  }

  private row(index: number): HTMLElement {
    const row = this.at(index);
    const node = h("div", {
      class: `vt-row${index === this.selected ? " on" : ""}`,
      role: "row",
      id: `row-${index}`,
      "aria-rowindex": index + 2,
      "aria-selected": index === this.selected ? "true" : "false",
    });
    for (const column of this.options.columns) {
      const classes = `vt-cell${column.numeric ? " num" : ""}`;
      node.append(h("div", { class: classes, role: "gridcell" }, row ? column.cell(row) : h("span", { class: "ghost" })));
    }
    if (row) {
      node.addEventListener("click", () => {
        this.selected = index;
        this.options.onOpen(row, index);
      });
    }
    return node;
  }

  private async load(window_: number): Promise<void> {
    if (this.windows.has(window_)) return;
    const generation = this.generation;
    this.windows.set(window_, "pending");
    try {
      const rows = await this.options.fetch(window_ * WINDOW, WINDOW);
      if (generation !== this.generation) return;
      this.windows.set(window_, rows);
      if (this.windows.size > KEPT_WINDOWS) {
        const oldest = this.windows.keys().next().value;
        if (oldest !== undefined) this.windows.delete(oldest);
      }
    } catch {
      if (generation === this.generation) this.windows.delete(window_);
      return;
    }
    this.schedule();
  }
}
