"""The samples of a run as one page to read: by step and problem, side by side, before and after, tokens shaded.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]     writes RUN/samples.html, which needs no network

At most 5,000 training and 5,000 evaluation samples, 20 MB each, from steps spread evenly over the run; the page says
how many are left out. Model output is hostile: JSON with < escaped, shown as text; its policy forbids any other script.
"""
import argparse
import base64
import contextlib
import hashlib
import json
from pathlib import Path

PAGE = """<!doctype html><html lang="en" style="color-scheme: light dark"><meta charset="utf-8"><title>Samples</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'HASH'">
<style>
body { margin: 0 auto; max-width: 1500px; padding: 0 1.2em; font: 15px/1.45 system-ui, sans-serif }
form { position: sticky; top: 0; z-index: 1; background: Canvas; padding: .6em 0; border-bottom: 1px solid #8888 }
form, .row { display: flex; flex-wrap: wrap; gap: .5em .9em; align-items: end }
label { display: grid; font-size: .8em }
select, input { font: 1.1em system-ui, sans-serif; max-width: 13em }
h1, h2 { font-size: 1.2em; margin: .8em 0 .1em }
article { padding-bottom: .8em; border-bottom: 1px solid; content-visibility: auto; contain-intrinsic-size: auto 30em }
.row { flex-wrap: nowrap; overflow-x: auto; align-items: start; margin-top: .6em }
.cell { flex: 1 0 17em; max-width: 48em }
.right, .wrong { border-left: 4px solid #0072B2; padding-left: .6em; margin-bottom: .8em }
.wrong { border-left: 4px dotted #D55E00 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 26em; overflow-y: auto; margin: .2em 0 }
</style><h1></h1><form method="dialog">
<label>set<select name="set"></select></label><label>step<select name="step"></select></label>
<label>verdict<select name="verdict"><option>all<option>right<option>wrong<option>mixed group</select></label>
<label>stop reason<select name="stop"></select></label><label>text<input name="text" type="search"></label>
<label>shade tokens by<select name="shade"><option>none<option>values<option>advantages<option>logprobs</select></label>
<label>page<input name="page" type="number" min="1" value="1"></label><output aria-live="polite"></output></form>
<main></main><script type="application/json" id="data">DATA</script><script>SCRIPT</script></html>
"""
SCRIPT = r"""
const {title, samples} = JSON.parse(document.getElementById("data").textContent), at = document.forms[0].elements;
const add = (parent, tag, textContent = "", className = "") =>  // the only way that text gets into the page
  Object.assign(parent.appendChild(document.createElement(tag)), {textContent, className});
const fill = (select, values) => select.replaceChildren(...[...new Set(values)].map(x => new Option(x)));
const right = s => s.reward > 0;
const shades = s => Array.isArray(s.tokens) && Array.isArray(s[at.shade.value]) ? s[at.shade.value] : [];
const trained = s => s.set === "train";
const group = (list, key) => [...Map.groupBy(list, key).values()];
function matches(s, {set, step, stop, verdict, text}) {
  return `${s.set}` === set && ["all", `${s.step}`].includes(step) && ["all", `${s.finish_reason}`].includes(stop)
    && (verdict === "right" ? right(s) : verdict !== "wrong" || !right(s))
    && [s.question, s.label, s.response].some(x => String(x).toLowerCase().includes(text.toLowerCase()));
}
function show(cell, s, scale) {
  const verdict = right(s) ? "\u2713 right" : "\u2717 wrong", box = add(cell, "div", "", verdict.slice(2));
  add(box, "small", `#${s.index} ${verdict}, reward ${s.reward}, ${s.length} tokens, ${s.finish_reason}`);
  const pre = Object.assign(add(box, "pre", shades(s).length ? "" : s.response), {tabIndex: 0});
  shades(s).forEach((x, i) => {
    const node = add(pre, "span", s.tokens[i]);
    node.title = ["values", "advantages", "logprobs"].map(k => `${k}: ${(s[k] || [])[i] ?? "-"}`).join("\n");
    node.style.background = `rgb(${x > 0 ? "0 114 178" : "213 94 0"} / ${0.7 * Math.abs(x) / scale})`;
  });
}
function card(list) {
  const box = add(document.querySelector("main"), "article"), [s] = list, solved = list.filter(right).length;
  const scale = list.flatMap(shades).reduce((most, x) => Math.max(most, Math.abs(x)), 1e-9);
  add(box, "h2", `${trained(s) ? "step " + s.step : s.set}, problem ${s.problem}: ${solved} of ${list.length} right`);
  add(box, "div", s.question);
  add(box, "small", `answer: ${s.label}` + (scale > 1e-9 ? `; blue is up to +${scale}, orange down to -${scale}` : ""));
  const row = add(box, "div", "", "row");
  for (const column of group(list, s => trained(s) ? s.index : s.step)) {
    const cell = add(row, "div", "", "cell");
    if (!trained(s)) add(cell, "b", `${column[0].step ? "after" : "before"}: step ${column[0].step}`);
    column.forEach(s => show(cell, s, scale));
  }
}
function render() {
  const wanted = Object.fromEntries(new FormData(document.forms[0]));
  const groups = group(samples.filter(s => matches(s, wanted)), s => (trained(s) ? s.step : "") + " " + s.problem)
    .filter(list => wanted.verdict !== "mixed group" || list.some(right) && !list.every(right));
  const pages = Math.max(1, Math.ceil(groups.length / 10)), page = Math.min(pages, Math.max(1, +at.page.value));
  document.querySelector("main").replaceChildren();
  groups.slice(10 * page - 10, 10 * page).forEach(card);
  document.querySelector("output").textContent = `page ${page} of ${pages}; ${groups.length} problems`;
  history.replaceState(null, "", "#" + new URLSearchParams(wanted));
}
document.querySelector("h1").textContent = title;
fill(at.set, samples.map(s => s.set));
fill(at.step, ["all", ...samples.map(s => s.step).sort((a, b) => a - b)]);
fill(at.stop, ["all", ...samples.map(s => s.finish_reason)]);
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (at[name]) at[name].value = value;
document.forms[0].addEventListener("input", event => {
  if (event.target !== at.page) at.page.value = 1;
  render();
});
render();
"""


def order(path: Path, per_step: int) -> tuple[list[int], int]:
    """Byte offsets of a file's samples, any beginning of them a fair choice; how many samples there are.

    First a problem of every step: the last step, the middle, the quarters, ...; then another problem of every step."""
    found, queue, start, total = {}, [], 0, 0
    for line in path.open("rb") if path.is_file() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):  # half a line
            row = json.loads(line)
            name, step, problem = str(row["set"]), int(row["step"]), str(row["problem"])
            found.setdefault(name, {}).setdefault(step, {}).setdefault(problem, []).append(start)
            total += 1
        start += len(line)
    for name, steps in found.items():
        kept = steps if name == "train" else {min(steps), max(steps)}  # of an evaluation: before and after
        for i, step in enumerate(sorted(kept, reverse=True)):
            queue += [(n, f"{i:020b}"[::-1], x) for n, xs in enumerate(steps[step].values()) for x in xs][:per_step]
    return [offset for *_, offset in sorted(queue)], total


def embed(path: Path, per_step: int, most: int, most_bytes: int) -> tuple[list[str], int]:
    """The chosen samples as JSON that may stand in a page, in the file's order; how many are left out."""
    chosen, (offsets, total) = {}, order(path, per_step)
    with path.open("rb") if offsets else contextlib.nullcontext() as file:
        for offset in offsets[:most]:
            file.seek(offset)
            row = json.loads(file.readline(), parse_constant=lambda _: None)  # JSON has no NaN
            text = json.dumps(row).replace("<", "\\u003c")
            if (most_bytes := most_bytes - len(text)) < 0:
                break
            chosen[offset] = text
    return [chosen[offset] for offset in sorted(chosen)], total - len(chosen)


def write(run: Path, out: Path, per_step: int = 64) -> None:
    """Writes the page of a run folder, half of it for each file; no file is an empty one."""
    parts = [embed(run / name, per_step, 5_000, 20_000_000) for name in ("samples.jsonl", "eval_samples.jsonl")]
    samples, left_out = sum((part[0] for part in parts), []), sum(part[1] for part in parts)
    title = json.dumps(f"{run.resolve().name}: {len(samples)} samples, {left_out} left out").replace("<", "\\u003c")
    policy = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    data = f'{{"title": {title}, "samples": [{",".join(samples)}]}}'
    out.write_text(PAGE.replace("HASH", policy).replace("SCRIPT", SCRIPT).replace("DATA", data), encoding="utf-8")
    print(f"wrote {out}: {len(samples)} samples, {left_out} left out")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max_per_step", type=int, default=64)
    args = parser.parse_args()
    if not (args.run.is_dir() and (out := args.out or args.run / "samples.html").parent.is_dir()):
        parser.error("RUN and the folder of --out must be there")
    write(args.run, out, args.max_per_step)
