// What every view is given, and what it gives back.

import type { RunInfo } from "./types";

export interface Context {
  /** Where the view draws. */
  root: HTMLElement;
  params: URLSearchParams;
  runs: RunInfo[];
  /** The run that a view of one run shows, if there is any. */
  run: RunInfo | null;
  signal: AbortSignal;
  /** Draws the view anew, as its address says. */
  reopen: () => void;
}

/** What the page asks of an open view; all of it is optional. */
export interface View {
  /** Files of a run grew. */
  changed?: (run: string, kinds: string[]) => void;
  /** Colours changed. */
  themed?: () => void;
  /** j and k, Enter, /. */
  move?: (by: number) => void;
  open?: () => void;
  search?: () => void;
  key?: (key: string) => boolean;
  close?: () => void;
}

export type Opener = (context: Context) => View | Promise<View>;
