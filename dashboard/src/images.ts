// Texts with images: every mention such as `[image 00ff00ff00ff]` becomes a thumbnail, which a click enlarges.

import { api } from "./api";
import { h, replace } from "./dom";
import { bytes } from "./format";
import type { ImageInfo } from "./types";

const MENTION = /\[image ([0-9a-f]{12})\]/g;

/** A text with its images; a mention of an image that the rollout does not list stays text. */
export function textWithImages(run: string, text: string, images: Record<string, ImageInfo>): HTMLElement {
  const box = h("pre", { class: "text" });
  let at = 0;
  for (const mention of text.matchAll(MENTION)) {
    const info = Object.hasOwn(images, mention[1] as string) ? images[mention[1] as string] : undefined;
    if (!info) continue;
    box.append(text.slice(at, mention.index), thumbnail(run, mention[0], info));
    at = mention.index + mention[0].length;
  }
  box.append(text.slice(at));
  return box;
}

function missing(mention: string, problem: string): HTMLElement {
  return h("span", { class: "image-missing", role: "note" }, `${mention} cannot be shown: ${problem}`);
}

function thumbnail(run: string, mention: string, info: ImageInfo): HTMLElement {
  const { digest } = info;
  if (digest === null || info.problem !== null) return missing(mention, info.problem ?? "its digest is unknown.");
  const label = `image ${digest.slice(0, 12)}, ${bytes(info.bytes)}`;
  const image = h("img", { src: api.imageAddress(run, digest, "thumbnail"), alt: label, loading: "lazy", decoding: "async" });
  const button = h("button", { type: "button", class: "thumbnail", title: `${label}: enlarge`, onclick: () => enlarge(run, digest, label) }, image);
  const box = h("span", { class: "image" }, button);
  image.addEventListener("error", () => {
    replace(box, missing(mention, "the server could not decode it."));
    void explain(image.src).then((problem) => replace(box, missing(mention, problem)));
  });
  return box;
}

/** What the server says of an image that could not be loaded. */
async function explain(address: string): Promise<string> {
  try {
    const answer = await fetch(address, { credentials: "same-origin" });
    const body = (await answer.json()) as { error?: unknown };
    return typeof body.error === "string" ? body.error : `the server answered ${answer.status}.`;
  } catch {
    return "the server does not answer. Is `roll dashboard` still running?";
  }
}

function enlarge(run: string, digest: string, label: string): void {
  document.querySelector("dialog")?.remove();
  const size = h("span", { class: "muted" });
  const image = h("img", { src: api.imageAddress(run, digest, "full"), alt: label });
  image.addEventListener("load", () => replace(size, `${label}, shown with ${image.naturalWidth} × ${image.naturalHeight} pixels`));
  const dialog = h("dialog", { class: "enlarged", "aria-label": label },
    image,
    h("p", {}, size, h("code", {}, digest), h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  );
  dialog.addEventListener("click", (e) => e.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
