// What the server answers, as the page reads it. `null` stands for what was not recorded, and for NaN and infinities.

export type Num = number | null;
export type Value = string | number | boolean | null;

export interface RunInfo {
  id: string;
  name: string;
  path: string;
  pipeline: string | null;
  status: "running" | "finished" | "stopped" | "unreadable";
  problem?: string | null;
  started_s: Num;
  updated_s: Num;
  step: Num;
  num_steps: Num;
  model: string | null;
  reward: Num;
  held_out: Num;
}

export interface Metrics {
  names: { name: string; kind: string }[];
  kinds: Record<string, { steps: number[]; time_s: Num[] }>;
}

export interface Series {
  steps: number[];
  time_s: Num[];
  series: Record<string, Num[]>;
}

export interface Row {
  row: number;
  step: Num;
  rollout_id: string;
  draw_id: Num;
  index: Num;
  [column: string]: unknown;
}

export interface Rows {
  total: number;
  matching?: number;
  rows: Row[];
  searched?: number;
  complete?: boolean;
  cursor?: string | number | null;
  indexing?: { files_left: number };
  problems?: string[];
}

export interface Turn {
  kind: string;
  text: string;
  start: Num;
  end: Num;
}

/** An image that a text mentions as `[image 00ff00ff00ff]`. */
export interface ImageInfo {
  digest: string | null;
  bytes: number | null;
  problem: string | null;
}
export interface Rollout extends Row {
  messages?: { role: string; content: string }[];
  turns?: Turn[];
  images?: Record<string, ImageInfo>;
  components?: Record<string, Num> | null;
}

export interface Tokens {
  tokens: string[];
  token_ids: number[];
  columns: Record<string, Num[]>;
  missing?: Record<string, string>;
}

export interface Facet {
  value: Value;
  count: number;
}
export type Facets = Record<string, Facet[] | { min: Num; max: Num }>;

export interface Span {
  lane: number;
  name: string;
  start_s: number;
  end_s: number;
  args?: Record<string, unknown> | null;
}
export interface Lanes {
  lanes: { name: string; kind: string }[];
  spans: Span[];
  merged: boolean;
  start_s: number;
  end_s: number;
  problem?: string;
  indexing?: { bytes_left: number };
}
export interface StepPhases {
  step: number;
  start_s: Num;
  end_s: Num;
  phases: Record<string, Num>;
  held_back_by: string | null;
}

export interface Health {
  alarms?: { step: Num; alarm: string; message: string; rows?: number[] }[];
  ledger?: { fates?: Record<string, number>; by_step?: Record<string, Num>[]; reasons?: Record<string, number> };
  syncs?: Record<string, unknown>[];
  memory?: Record<string, { steps: number[]; bytes: Num[] }>;
  failures?: { cause: string; count: number; first_step: Num; last_step: Num }[];
  log_tail?: unknown[];
  indexing?: { files_left: number };
}

export interface PlanItem {
  name: string;
  kind?: string;
  text?: string;
  values?: Record<string, unknown>;
  table?: { columns: string[]; rows: unknown[][] };
  predicted?: Record<string, Num>;
}
export interface Plan {
  problem?: string;
  items?: PlanItem[];
  [key: string]: unknown;
}

export interface Answer {
  id: string;
  question: string;
  answer: string;
  tone: "" | "good" | "warn" | "bad";
  figures: { name: string; value: number | string }[];
  links: { text: string; view: string; params: Record<string, string | number> }[];
}
export interface Answers {
  answers: Answer[];
  indexing?: { files_left: number };
}

export interface Config {
  text: string;
  values: Record<string, unknown>;
  history?: unknown[];
}
export interface Diff {
  keys: { key: string; values: unknown[] }[];
}
