// Requests to the server; one error for all that goes wrong, with a text for people.

import type {
  Answers,
  Config,
  Diff,
  Facets,
  Health,
  Lanes,
  Metrics,
  Plan,
  Rollout,
  Row,
  Rows,
  RunInfo,
  Series,
  StepPhases,
  Tokens,
} from "./types";

export class ApiError extends Error {}

type Query = Record<string, string | number | boolean | null | undefined>;

async function get<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  const params = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") params.set(key, String(value));
  }
  const text = params.toString();
  let answer: Response;
  try {
    answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal, credentials: "same-origin" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server does not answer. Is `roll dashboard` still running?");
  }
  if (!answer.ok) {
    const body = (await answer.json().catch(() => null)) as { error?: unknown } | null;
    throw new ApiError(typeof body?.error === "string" ? body.error : `The server answered ${answer.status}.`);
  }
  return (await answer.json()) as T;
}

const of = (run: string) => `runs/${encodeURIComponent(run)}`;

export const api = {
  runs: (signal?: AbortSignal) => get<RunInfo[]>("runs", {}, signal),
  metrics: (run: string, signal?: AbortSignal) => get<Metrics>(`${of(run)}/metrics`, {}, signal),
  /** Curves to draw: of thousands of steps lows and highs, or all of them with `full`. */
  series: (run: string, names: string[], kind: string, full: boolean, signal?: AbortSignal) =>
    get<Series>(`${of(run)}/series`, { names: names.join(","), kind, full: full || null }, signal),
  config: (run: string, signal?: AbortSignal) => get<Config>(`${of(run)}/config`, {}, signal),
  diff: (runs: string[], signal?: AbortSignal) => get<Diff>("diff", { runs: runs.join(",") }, signal),
  rollouts: (run: string, query: Query, signal?: AbortSignal) => get<Rows>(`${of(run)}/rollouts`, query, signal),
  facets: (run: string, signal?: AbortSignal) => get<Facets>(`${of(run)}/facets`, {}, signal),
  rollout: (run: string, row: number, signal?: AbortSignal) =>
    get<Rollout>(`${of(run)}/rollouts/${row}`, {}, signal),
  group: async (run: string, row: number, signal?: AbortSignal) =>
    (await get<{ rows: Row[] }>(`${of(run)}/rollouts/${row}/group`, {}, signal)).rows,
  tokens: (run: string, row: number, signal?: AbortSignal) =>
    get<Tokens>(`${of(run)}/rollouts/${row}/tokens`, {}, signal),
  lanes: (run: string, query: Query, signal?: AbortSignal) => get<Lanes>(`${of(run)}/trace/lanes`, query, signal),
  steps: (run: string, signal?: AbortSignal) => get<StepPhases[]>(`${of(run)}/trace/steps`, {}, signal),
  health: (run: string, signal?: AbortSignal) => get<Health>(`${of(run)}/health`, {}, signal),
  answers: (run: string, signal?: AbortSignal) => get<Answers>(`${of(run)}/answers`, {}, signal),
  /** The address of an image as PNG; `thumbnail` is at most 256 pixels wide and high. */
  imageAddress: (run: string, digest: string, size: "thumbnail" | "full") =>
    `/api/${of(run)}/images/${encodeURIComponent(digest)}?size=${size}`,
  plan: (run: string, signal?: AbortSignal) => get<Plan>(`${of(run)}/plan`, {}, signal),
};

/** Calls `onChange` when files of the run grew; the browser reconnects by itself. Returns how to stop. */
export function listen(run: string, onChange: (kinds: string[]) => void, onState: (live: boolean) => void): () => void {
  const source = new EventSource(`/api/${of(run)}/events`);
  source.addEventListener("open", () => onState(true));
  source.addEventListener("error", () => onState(false));
  source.addEventListener("changed", (event) => {
    const data = JSON.parse((event as MessageEvent<string>).data) as { kinds?: string[] };
    onChange(data.kinds ?? []);
  });
  return () => source.close();
}
