// Bundles src/ into src/roll/dashboard/static/, which is what the wheel ships: the same bytes for the same sources.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "..", "src", "roll", "dashboard", "static");
mkdirSync(out, { recursive: true });

await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.ts", style: "src/style.css" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  charset: "utf8",
  legalComments: "none",
  logLevel: "warning",
});
copyFileSync(join(here, "src", "index.html"), join(out, "index.html"));
copyFileSync(join(here, "src", "icon.svg"), join(out, "icon.svg"));

const bundled = ["uplot"];
const licences = bundled.map((name) => {
  const root = join(here, "node_modules", name);
  const { version } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
  return `${name} ${version}\n\n${readFileSync(join(root, "LICENSE"), "utf8").trim()}\n`;
});
writeFileSync(join(out, "LICENSES.txt"), `Packages that app.js and style.css contain.\n\n${licences.join("\n")}`);
