"""Writes the samples of a run as one page to read, which needs no network.

    python tools/samples.py RUN [--out PATH] [--max_per_step N]     writes RUN/samples.html

The samples of a problem stand side by side, by step, and evaluation samples before and after the
training. Tokens can be shaded by their values, advantages or log-probs. The page holds at most
5,000 training and 5,000 evaluation samples, 20 MB each, from steps spread evenly over the run, and
says how many are left out. Model output is hostile. It is JSON with < escaped and is shown as
text, and the policy of the page forbids every script but its own.
"""

import argparse
import base64
import contextlib
import hashlib
import json
from pathlib import Path

PAGE = """<!doctype html><html lang="en" style="color-scheme: light dark">
<meta charset="utf-8"><title>Samples</title>
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'HASH'">
<style>
body { margin: 0 auto; max-width: 1500px; padding: 0 1.2em; font: 15px/1.45 system-ui, sans-serif }
form { position: sticky; top: 0; z-index: 1; background: Canvas; padding: .6em 0 }
form { border-bottom: 1px solid #8888 }
form, .row { display: flex; flex-wrap: wrap; gap: .5em .9em; align-items: end }
label { display: grid; font-size: .8em }
select, input { font: 1.1em system-ui, sans-serif; max-width: 13em }
h1, h2 { font-size: 1.2em; margin: .8em 0 .1em }
article { padding-bottom: .8em; border-bottom: 1px solid }
article { content-visibility: auto; contain-intrinsic-size: auto 30em }
.row { flex-wrap: nowrap; overflow-x: auto; align-items: start; margin-top: .6em }
.cell { flex: 1 0 17em; max-width: 48em }
.right, .wrong { border-left: 4px solid #0072B2; padding-left: .6em; margin-bottom: .8em }
.wrong { border-left: 4px dotted #D55E00 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2em 0 }
pre { max-height: 26em; overflow-y: auto }
</style><h1></h1><form method="dialog">
<label>set<select name="set"></select></label>
<label>step<select name="step"></select></label>
<label>verdict<select name="verdict">
<option>all<option>right<option>wrong<option>mixed group</select></label>
<label>stop reason<select name="stop"></select></label>
<label>text<input name="text" type="search"></label>
<label>shade tokens by<select name="shade">
<option>none<option>values<option>advantages<option>logprobs</select></label>
<label>page<input name="page" type="number" min="1" value="1"></label>
<output aria-live="polite"></output></form>
<main></main>
<script type="application/json" id="data">DATA</script><script>SCRIPT</script></html>
"""
SCRIPT = r"""
const {title, samples} = JSON.parse(document.getElementById("data").textContent);
const at = document.forms[0].elements;
// This is the only way that text gets into the page.
const add = (parent, tag, textContent = "", className = "") =>
  Object.assign(parent.appendChild(document.createElement(tag)), {textContent, className});
const fill = (select, values) =>
  select.replaceChildren(...[...new Set(values)].map(x => new Option(x)));
const right = s => s.reward > 0;
const shades = s =>
  Array.isArray(s.tokens) && Array.isArray(s[at.shade.value]) ? s[at.shade.value] : [];
const trained = s => s.set === "train";
const group = (list, key) => [...Map.groupBy(list, key).values()];
const holds = (value, text) => String(value).toLowerCase().includes(text.toLowerCase());
function matches(s, {set, step, stop, verdict, text}) {
  return `${s.set}` === set
    && ["all", `${s.step}`].includes(step)
    && ["all", `${s.finish_reason}`].includes(stop)
    && (verdict === "right" ? right(s) : verdict !== "wrong" || !right(s))
    && [s.question, s.label, s.response].some(x => holds(x, text));
}
function show(cell, s, scale) {
  const verdict = right(s) ? "\u2713 right" : "\u2717 wrong";
  const box = add(cell, "div", "", verdict.slice(2));
  const facts = [`reward ${s.reward}`, `${s.length} tokens`, s.finish_reason].join(", ");
  add(box, "small", `#${s.index} ${verdict}, ${facts}`);
  const pre = add(box, "pre", shades(s).length ? "" : s.response);
  pre.tabIndex = 0;
  shades(s).forEach((x, i) => {
    const node = add(pre, "span", s.tokens[i]);
    node.title = ["values", "advantages", "logprobs"]
      .map(k => `${k}: ${(s[k] || [])[i] ?? "-"}`).join("\n");
    const colour = x > 0 ? "0 114 178" : "213 94 0";
    node.style.background = `rgb(${colour} / ${0.7 * Math.abs(x) / scale})`;
  });
}
function card(list) {
  const box = add(document.querySelector("main"), "article");
  const [s] = list;
  const solved = list.filter(right).length;
  const scale = list.flatMap(shades).reduce((most, x) => Math.max(most, Math.abs(x)), 1e-9);
  const where = trained(s) ? "step " + s.step : s.set;
  const legend = scale > 1e-9 ? `; blue is up to +${scale}, orange down to -${scale}` : "";
  add(box, "h2", `${where}, problem ${s.problem}: ${solved} of ${list.length} right`);
  add(box, "div", s.question);
  add(box, "small", `answer: ${s.label}${legend}`);
  const row = add(box, "div", "", "row");
  for (const column of group(list, s => trained(s) ? s.index : s.step)) {
    const cell = add(row, "div", "", "cell");
    const {step} = column[0];
    if (!trained(s)) add(cell, "b", `${step ? "after" : "before"}: step ${step}`);
    column.forEach(s => show(cell, s, scale));
  }
}
function render() {
  const wanted = Object.fromEntries(new FormData(document.forms[0]));
  const found = samples.filter(s => matches(s, wanted));
  const groups = group(found, s => (trained(s) ? s.step : "") + " " + s.problem)
    .filter(list => wanted.verdict !== "mixed group" || list.some(right) && !list.every(right));
  const pages = Math.max(1, Math.ceil(groups.length / 10));
  const page = Math.min(pages, Math.max(1, +at.page.value));
  document.querySelector("main").replaceChildren();
  groups.slice(10 * page - 10, 10 * page).forEach(card);
  const shown = `page ${page} of ${pages}; ${groups.length} problems`;
  document.querySelector("output").textContent = shown;
  history.replaceState(null, "", "#" + new URLSearchParams(wanted));
}
document.querySelector("h1").textContent = title;
fill(at.set, samples.map(s => s.set));
fill(at.step, ["all", ...samples.map(s => s.step).sort((a, b) => a - b)]);
fill(at.stop, ["all", ...samples.map(s => s.finish_reason)]);
for (const [name, value] of new URLSearchParams(location.hash.slice(1)))
  if (at[name]) at[name].value = value;
document.forms[0].addEventListener("input", event => {
  if (event.target !== at.page) at.page.value = 1;
  render();
});
render();
"""


# What a line that is no sample raises.
NO_SAMPLE = (ValueError, TypeError, KeyError, RecursionError, OverflowError)


def find(path: Path) -> dict[str, dict]:
    """Returns {set: {step: {problem: byte offsets of its samples}}} of a file, {} without a file.

    Lines that are no sample, such as the half line of a run that was killed, are left out.
    """
    found = {}
    if not path.is_file():
        return found
    start = 0
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(*NO_SAMPLE):
                row = json.loads(line)
                name = str(row["set"])
                step = int(row["step"])
                problem = str(row["problem"])
                problems = found.setdefault(name, {}).setdefault(step, {})
                problems.setdefault(problem, []).append(start)
            start += len(line)
    return found


def order(path: Path, per_step: int) -> tuple[list[int], int]:
    """Byte offsets of a file's samples, any beginning of them a fair choice, and their number.

    A problem of every step comes first, of the last step, the middle one, the quarters and so on,
    then another problem of every step. Of an evaluation only the first step and the last are kept.
    """
    queue = []
    total = 0
    for name, steps in find(path).items():
        for problems in steps.values():
            total += sum(len(offsets) for offsets in problems.values())
        kept = steps if name == "train" else {min(steps), max(steps)}
        for age, step in enumerate(sorted(kept, reverse=True)):
            # The bits of a count in reverse order halve the run again and again.
            turn = f"{age:020b}"[::-1]
            samples_of_step = []
            for number, offsets in enumerate(steps[step].values()):
                samples_of_step += [(number, turn, offset) for offset in offsets]
            queue += samples_of_step[:per_step]
    return [offset for _, _, offset in sorted(queue)], total


def null(constant: str) -> None:
    """Stands for NaN and infinity, which Python's JSON has and a browser refuses."""


def embed(path: Path, per_step: int, max_samples: int, max_bytes: int) -> tuple[list[str], int]:
    """The chosen samples as JSON that may stand in a page, in the file's order.

    The second value is how many are left out.
    """
    offsets, total = order(path, per_step)
    if not offsets:
        return [], total
    chosen = {}
    with path.open("rb") as file:
        for offset in offsets[:max_samples]:
            file.seek(offset)
            row = json.loads(file.readline(), parse_constant=null)
            text = escape(row)
            max_bytes -= len(text)
            if max_bytes < 0:
                break
            chosen[offset] = text
    texts = [chosen[offset] for offset in sorted(chosen)]
    return texts, total - len(texts)


def escape(value) -> str:
    """JSON that cannot close the script element in which it stands."""
    return json.dumps(value).replace("<", "\\u003c")


def write(run: Path, out: Path, per_step: int = 64) -> None:
    """Writes the page of a run folder, half of it for each file. No file is an empty one."""
    samples = []
    left_out = 0
    for name in ("samples.jsonl", "eval_samples.jsonl"):
        texts, more = embed(run / name, per_step, 5_000, 20_000_000)
        samples += texts
        left_out += more
    counts = f"{len(samples)} samples, {left_out} left out"
    title = escape(f"{run.resolve().name}: {counts}")
    digest = hashlib.sha256(SCRIPT.encode()).digest()
    policy = "sha256-" + base64.b64encode(digest).decode()
    data = f'{{"title": {title}, "samples": [{",".join(samples)}]}}'
    # The data comes last, because it may hold the words that are replaced.
    page = PAGE.replace("HASH", policy).replace("SCRIPT", SCRIPT)
    out.write_text(page.replace("DATA", data), encoding="utf-8")
    print(f"wrote {out}: {counts}")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max_per_step", type=int, default=64)
    args = parser.parse_args()
    out = args.out or args.run / "samples.html"
    if not args.run.is_dir() or not out.parent.is_dir():
        parser.error("RUN and the folder of --out must be there")
    write(args.run, out, args.max_per_step)


if __name__ == "__main__":
    main()
