// The address holds the whole state of a view: `#/rollouts?run=…&sort=reward`. A link reproduces what is seen.

export interface Route {
  view: string;
  params: URLSearchParams;
}

export function current(): Route {
  const hash = location.hash.replace(/^#\/?/, "");
  const cut = hash.indexOf("?");
  const view = cut < 0 ? hash : hash.slice(0, cut);
  return { view: view || "overview", params: new URLSearchParams(cut < 0 ? "" : hash.slice(cut + 1)) };
}

type Params = Record<string, string | number | null | undefined>;

export function link(view: string, params: Params): string {
  const search = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") search.set(key, String(value));
  }
  const text = search.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

/** Opens a view as a new entry of the history. */
export function go(view: string, params: Params): void {
  location.hash = link(view, params);
}

/** Writes changes of the present view's state into the address, without opening it anew. */
export function remember(changes: Params): void {
  const { view, params } = current();
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") params.delete(key);
    else params.set(key, String(value));
  }
  const text = params.toString();
  history.replaceState(null, "", `#/${view}${text ? `?${text}` : ""}`);
}
