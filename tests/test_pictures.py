"""The picture of a run and the page of its samples.

They are drawn from any file; the page is read in a real browser and is safe from its own text.
"""

import contextlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from tools import plot, samples

CHROMIUM = next(
    (path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path),
    None,
)
HOSTILE = [
    "</script><script>window.pwned = 1; alert(1)</script>",
    "<img src=x onerror='window.pwned = 1; alert(1)'>",
    "<!--<script>",
    "]]>&lt;b&gt;\u2028\u0000 \ud800 Infinity NaN HASH SCRIPT DATA",
    "$\\frac{$ __proto__ ${alert(1)}",
]


def lines(path: Path, rows: list, end: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def make_run(run: Path, steps: int = 60, critic: bool = True, kl: bool = False, **more) -> Path:
    """A plausible metrics.jsonl and eval.jsonl."""
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward": step / steps,
            "truncated": 0.1,
            "response_length": 20.0 + step,
            "entropy": 1.0,
            "length_wrong_mean": 20.0,
            "length_wrong_histogram": [0, 3],
            "policy_grad_norm": 1 / step,
            "seconds": 3.0,
            "seconds_rollout": 1.5,
            "seconds_policy": 1.0,
            "seconds_reward": 0.001,
        }
        row |= {"length_right_mean": 30.0} if step > 1 else {}
        row |= (
            {"explained_variance": None if step == 1 else -5 / step, "critic_grad_norm": 2.0}
            if critic
            else {}
        )
        rows.append(row | ({"kl": 0.01 * step} if kl else {}) | more)
    lines(run / "metrics.jsonl", rows)
    lines(
        run / "eval.jsonl",
        [
            {"step": s, "set": name, "accuracy": s / steps, "stderr": 0.01}
            for s in (0, steps)
            for name in ("eval", "a $long_{name of a set")
        ],
    )
    return run


def size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and len(data) > 10_000
    return struct.unpack(">II", data[16:24])


BROKEN = {  # name: metrics.jsonl, eval.jsonl
    "nothing": (None, None),
    "empty": ("", ""),
    "half a line": ('{"step": 1, "reward": 0.5}\n{"step": 2, "rew', '{"st'),
    "one step": ('{"step": 1, "reward": 0.5, "seconds": 2, "policy_grad_norm": 0.0}\n', None),
    "only an evaluation": ("", '{"step": 0, "set": "eval", "accuracy": 0.25}\n'),
    "no objects": ('[1]\n3\nnull\n"step"\n' + "[" * 100_000 + "\n", "{}\n"),
    "wrong types": (
        '{"step": "1", "reward": 1}\n{"step": 2, "reward": "x", "entropy": [1], "seconds": null}\n'
        '{"step": NaN, "reward": 1}\n{"step": 3, "reward": NaN, "kl": Infinity, "entropy": 1e999}\n'
        '{"step": null}\n{"step": -1, "reward": 1}\n{"reward": 1}\n',
        '{"step": 1, "set": null, "accuracy": "high"}\n',
    ),
    "only zeros": (
        '{"step": 0, "reward": 0, "policy_grad_norm": 0, "seconds": 0, "seconds_rollout": 0}\n' * 3,
        "",
    ),
    "far out": (
        '{"step": 1, "explained_variance": -1e9, "reward": -1e12, "policy_grad_norm": 1e-300}\n',
        "",
    ),
}


@pytest.mark.parametrize("metrics, evaluations", BROKEN.values(), ids=BROKEN)
@pytest.mark.slow
def test_any_file_gives_a_picture(tmp_path, metrics, evaluations):
    for name, text in (("metrics.jsonl", metrics), ("eval.jsonl", evaluations)):
        if text is not None:
            (tmp_path / name).write_text(text)
    plot.draw([tmp_path], tmp_path / "curves.png")
    assert size(tmp_path / "curves.png") == (1500, 900)
    plot.draw([tmp_path, make_run(tmp_path / "whole")], tmp_path / "both.png")
    assert size(tmp_path / "both.png") == (1500, 900)


def test_bytes_that_are_no_text(tmp_path):
    make_run(tmp_path, steps=3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00\n")
    assert sorted(plot.read(tmp_path)["reward"]) == [1, 2, 3]


def test_read_keeps_numbers_by_name_and_step(tmp_path):
    lines(
        tmp_path / "metrics.jsonl",
        [
            {"step": 1, "reward": 0.5, "kl": None, "length_right_histogram": [1]},
            {"step": 2, "reward": 1},
        ],
        end='{"step": 3, "rew',
    )
    lines(tmp_path / "eval.jsonl", [{"step": 2, "set": "aime", "accuracy": 0.25, "pass@4": 0.5}])
    assert plot.read(tmp_path) == {
        "step": {1: 1, 2: 2},
        "reward": {1: 0.5, 2: 1},
        "step aime": {2: 2},
        "accuracy aime": {2: 0.25},
        "pass@4 aime": {2: 0.5},
    }


@pytest.mark.parametrize("n", [1, 2, 39, 40, 79, 80, 333])
def test_smooth_is_a_centred_mean(n):
    import numpy as np

    y = np.random.default_rng(n).normal(size=n)
    reach = n // 40
    slow = [y[max(0, i - reach) : i + reach + 1].mean() for i in range(n)]
    np.testing.assert_allclose(plot.smooth(y), slow)


@pytest.mark.slow
def test_command_line_and_time(tmp_path):
    """One run gives RUN/curves.png, several give curves.png here or --out.

    A run of 2,000 steps takes about 2 s, once everything is imported.
    """
    runs = [
        make_run(tmp_path / name, **kw)
        for name, kw in (
            ("gae", {"kl": True}),
            ("$grpo_{", {"critic": False}),
            ("short", {"steps": 2}),
        )
    ]
    script = [sys.executable, ROOT / "tools" / "plot.py"]
    subprocess.run([*script, runs[0]], check=True, cwd=tmp_path)
    subprocess.run([*script, *runs], check=True, cwd=tmp_path)
    subprocess.run([*script, *runs, "--out", tmp_path / "x.png"], check=True, cwd=tmp_path)
    for path in (runs[0] / "curves.png", tmp_path / "curves.png", tmp_path / "x.png"):
        assert size(path) == (1500, 900)
    long = make_run(tmp_path / "long", steps=2000)
    begin = time.process_time()
    plot.draw([long], tmp_path / "long.png")
    assert time.process_time() - begin < 8


def test_many_runs_have_their_own_colours_or_dashes(tmp_path):
    from matplotlib.figure import Figure

    runs = [plot.read(make_run(tmp_path / f"lambda_{i}", steps=3 + i)) for i in range(10)]
    ax = Figure().add_subplot()
    plot.fill(ax, plot.Panel("", (plot.Curve("entropy"),)), runs)
    looks = {
        (line.get_color(), line.get_linestyle()) for line in ax.lines if line.get_linewidth() > 1
    }
    assert len(looks) == 10
    plot.draw([tmp_path / f"lambda_{i}" for i in range(10)], tmp_path / "ten.png")
    assert size(tmp_path / "ten.png") == (1500, 900)


def test_phases_add_up_to_the_step(tmp_path):
    from matplotlib.figure import Figure

    ends = plot.stack(Figure().add_subplot(), plot.read(make_run(tmp_path)))
    assert [text for _, text, _ in ends] == ["rollout 1.50", "policy 1.00", "other 0.50"]
    assert [round(y, 6) for y, *_ in ends] == [0.75, 2.0, 2.75]


def run_plot(*args) -> tuple[int, list[str]]:
    """The exit code and the lines on stderr of the command."""
    command = [sys.executable, ROOT / "tools" / "plot.py", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path):
    """The tool once printed a warning and ended with 0, because training called it."""
    code, (line,) = run_plot(make_run(tmp_path), "--out", tmp_path / "missing" / "curves.png")
    assert code == 2 and line.startswith("error: ") and "missing/curves.png: No such file" in line


@pytest.mark.parametrize("metrics", [None, "", '{"step": 1, "rew'])
def test_a_folder_without_metrics_is_one_line(tmp_path, metrics):
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    code, (line,) = run_plot(make_run(tmp_path / "whole"), tmp_path)
    assert code == 2 and line.startswith(f"error: {tmp_path} has no number in metrics.jsonl")
    assert not list(tmp_path.glob("**/*.png"))


def sample(step, problem, index, right=False, name="train", tokens=False, **more) -> dict:
    """A line as report.py writes it."""
    row = {
        "step": step,
        "set": name,
        "problem": problem,
        "question": f"{problem}+1",
        "label": str(problem + 1),
        "index": index,
        "response": f"it is {problem + right}",
        "reward": float(right),
        "length": 3,
        "finish_reason": "stop" if index else "length",
    }
    if tokens:
        row |= {
            "tokens": ["it", " is", " <b>"],
            "values": [0.5, None, -0.25],
            "advantages": [1.0, -1.0, 0.0],
            "logprobs": [-0.1, -2.0, -1.0],
        }
    return row | more


def embedded(page: Path) -> dict:
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])


def test_page_keeps_whole_lines_and_counts_the_rest(tmp_path):
    rows = [
        sample(step, problem, i) for step in range(1, 9) for problem in range(4) for i in range(4)
    ]
    lines(tmp_path / "samples.jsonl", rows, end='{"step": 9, "set": "tr')
    lines(
        tmp_path / "eval_samples.jsonl",
        [sample(step, p, 0, name="eval") for step in (0, 4, 8) for p in range(5)],
    )
    samples.write(tmp_path, tmp_path / "page.html", per_step=6)
    data = embedded(tmp_path / "page.html")
    assert data["title"].endswith(": 58 samples, 85 left out")
    kept = [s for s in data["samples"] if s["set"] == "train"]
    assert kept == [
        s for s in rows if s["problem"] * 4 + s["index"] < 6
    ]  # whole problems first, in the file's order
    assert {s["step"] for s in data["samples"] if s["set"] == "eval"} == {0, 8}  # before and after


@pytest.mark.parametrize("most, steps", [(2, {64}), (4, {32, 64}), (8, {16, 32, 48, 64})])
def test_a_page_that_is_full_holds_steps_of_the_whole_run(tmp_path, most, steps):
    lines(
        tmp_path / "samples.jsonl",
        [sample(step, p, i) for step in range(1, 65) for p in (0, 1) for i in (0, 1)],
    )
    texts, left_out = samples.embed(tmp_path / "samples.jsonl", 64, most, 10**9)
    assert {json.loads(text)["step"] for text in texts} == steps and left_out == 256 - most
    texts, left_out = samples.embed(tmp_path / "samples.jsonl", 64, 10**9, 5 * len(texts[0]))
    assert 0 < len(texts) <= 5 and left_out == 256 - len(texts)


@pytest.mark.parametrize(
    "text", [None, "", '{}\n[]\nnull\n{"step"', '{"step": 1e999, "set": 1, "problem": []}\n']
)
def test_a_page_of_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "samples.jsonl").write_text(text)
    samples.write(tmp_path, tmp_path / "samples.html")
    assert embedded(tmp_path / "samples.html")["samples"] == []


class Browser:
    """Headless Chromium, driven over its debugging pipe, without a driver or a port.

    It remembers what a page must not do.
    """

    def __init__(self, profile: Path):
        flags = (
            "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
            "--disable-background-networking --disable-component-update --disable-sync "
            "--window-size=1400,1000 --remote-debugging-pipe"
        )
        inside, self.out = os.pipe()
        back, outside = os.pipe()
        command = [
            "bash",
            "-c",
            f'exec "$@" 3<&{inside} 4>&{outside}',
            "-",
            CHROMIUM,
            *flags.split(),
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self.process = subprocess.Popen(
            command, pass_fds=(inside, outside), stderr=subprocess.DEVNULL
        )
        os.close(inside)
        os.close(outside)
        self.back, self.number, self.session, self.events = os.fdopen(back, "rb", 0), 0, {}, []
        self.buffer = b""
        target = self("Target.createTarget", url="about:blank")
        attached = self("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params) -> dict:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params} | self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.buffer:
                data = self.back.read(1 << 16)
                assert data, "the browser ended"
                self.buffer += data
            text, self.buffer = self.buffer.split(b"\0", 1)
            message = json.loads(text)
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def js(self, code: str):
        result = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, page: Path, state: str = "") -> None:
        self.events.clear()
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=page.as_uri() + "#" + state)
        end = time.time() + 20
        while not self.js(
            "document.readyState === 'complete' && !!document.querySelector('output')"
        ):
            assert time.time() < end, "the page does not load"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        box = self.js(
            f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )

    def key(self, key: str, text: str = "") -> None:
        codes = {"Tab": 9, "ArrowDown": 40, "ArrowUp": 38, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes.get(key, 0),
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def choose(self, name: str, value: str) -> None:
        self.js(
            f"document.forms[0].{name}.value = {json.dumps(value)};"
            f"document.forms[0].{name}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )

    def texts(self, selector: str) -> list[str]:
        return self.js(f"[...document.querySelectorAll('{selector}')].map(x => x.textContent)")

    def misdeeds(self) -> list:
        """Dialogs, uncaught errors, errors on the console, and requests for anything else."""
        bad = ("Page.javascriptDialogOpening", "Runtime.exceptionThrown", "Log.entryAdded")
        urls = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        elsewhere = [
            url for url in urls if not url.endswith("/samples.html") and url != "about:blank"
        ]
        return [e for e in self.events if e.get("method") in bad] + elsewhere

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.session = {}
            self("Browser.close")
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no chromium on the PATH: the page of samples is not clicked through")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Three steps of four problems, a quarter of the answers right, and two evaluations.

    The first problem has its samples token by token; one evaluation problem improves.
    """
    run = tmp_path_factory.mktemp("run")
    lines(
        run / "samples.jsonl",
        [
            sample(step, p, i, right=i == 1 and p > 0, tokens=p == 0)
            for step in (1, 2, 3)
            for p in range(4)
            for i in range(4)
        ],
    )
    lines(
        run / "eval_samples.jsonl",
        [sample(s, p, 0, right=s == 3 and p == 1, name="eval") for s in (0, 3) for p in range(2)],
    )
    samples.write(run, run / "samples.html")
    return run / "samples.html"


def test_groups_side_by_side_and_pages(browser, page):
    browser.open(page)
    assert browser.js("document.querySelector('h1').textContent").endswith(
        ": 52 samples, 0 left out"
    )
    assert (
        len(browser.texts("article")) == 10
        and "page 1 of 2; 12 problems" in browser.texts("output")[0]
    )
    assert browser.texts("h2")[1] == "step 1, problem 1: 1 of 4 right"
    assert browser.texts("article:nth-of-type(2) small")[1:3] == [
        "#0 \u2717 wrong, reward 0, 3 tokens, length",
        "#1 \u2713 right, reward 1, 3 tokens, stop",
    ]
    tops = browser.js(
        "[...document.querySelectorAll('article:nth-of-type(2) .cell')].map(x => x.offsetTop)"
    )
    assert len(tops) == 4 and len(set(tops)) == 1
    browser.click("[name=page]")
    browser.key("ArrowUp")
    assert len(browser.texts("article")) == 2 and "page 2 of 2" in browser.texts("output")[0]
    assert not browser.misdeeds()


def test_filters(browser, page):
    browser.open(page)
    browser.choose("step", "2")
    assert [h.split(",")[0] for h in browser.texts("h2")] == ["step 2"] * 4
    browser.choose("verdict", "right")
    assert len(browser.texts(".right")) == 3 and not browser.texts(".wrong")
    browser.choose("verdict", "mixed group")
    assert len(browser.texts("article")) == 3 and len(browser.texts(".wrong")) == 9
    browser.choose("verdict", "all")
    browser.choose("stop", "length")
    assert len(browser.texts("pre")) == 4
    browser.choose("stop", "all")
    browser.click("[name=text]")
    for letter in "IT IS 4":
        browser.key(letter, letter)
    assert browser.texts("pre") == ["it is 4"]
    browser.key("Enter", "\r")
    assert browser.texts("pre") == ["it is 4"]  # Enter sends nothing anywhere
    assert "step=2" in browser.js("location.hash") and "IT+IS+4" in browser.js("location.hash")
    assert not browser.misdeeds()


def test_a_link_restores_a_view(browser, page):
    browser.open(page, "set=train&step=3&verdict=right&shade=values&junk=1&item=2")
    assert len(browser.texts("pre")) == 3 and browser.js("document.forms[0].step.value") == "3"


def test_tokens_are_shaded(browser, page):
    browser.open(page, "step=1")
    assert not browser.texts("pre span")
    for name, colours in (
        ("values", ["rgba(0, 114, 178, 0.7)", "rgba(213, 94, 0, 0)", "rgba(213, 94, 0, 0.35)"]),
        ("advantages", ["rgba(0, 114, 178, 0.7)", "rgba(213, 94, 0, 0.7)", "rgba(213, 94, 0, 0)"]),
        (
            "logprobs",
            ["rgba(213, 94, 0, 0.035)", "rgba(213, 94, 0, 0.7)", "rgba(213, 94, 0, 0.35)"],
        ),
    ):
        browser.choose("shade", name)
        assert (
            browser.texts("pre span")[:3] == ["it", " is", " <b>"]
            and len(browser.texts("pre span")) == 12
        )
        got = browser.js(
            "[...document.querySelectorAll('pre span')].slice(0, 3)"
            ".map(x => getComputedStyle(x).backgroundColor)"
        )
        assert [c.replace("0.36", "0.35").replace("0.698", "0.7") for c in got] == colours
    assert browser.texts("pre")[4] == "it is 1"  # no tokens: the text stays
    assert (
        browser.js("document.querySelector('pre span').title")
        == "values: 0.5\nadvantages: 1\nlogprobs: -0.1"
    )


def test_before_and_after(browser, page):
    browser.open(page)
    browser.choose("set", "eval")
    assert browser.texts("article:nth-of-type(2) b") == ["before: step 0", "after: step 3"]
    assert browser.texts("article:nth-of-type(2) pre") == ["it is 1", "it is 2"]
    browser.choose("verdict", "mixed group")
    assert browser.texts("h2") == ["eval, problem 1: 1 of 2 right"]


def test_keyboard_reaches_everything(browser, page):
    browser.open(page)
    seen = []
    for _ in range(9):
        browser.key("Tab")
        seen.append(browser.js("document.activeElement.name || document.activeElement.tagName"))
    assert [x for x in seen if x.islower()] == [
        "set",
        "step",
        "verdict",
        "stop",
        "text",
        "shade",
        "page",
    ]
    assert "PRE" in seen


@pytest.mark.parametrize(
    "field", ["response", "question", "label", "finish_reason", "set", "tokens"]
)
def test_hostile_text_stays_text(browser, tmp_path, field):
    """Text that would close the script or open a tag with a handler is shown and never run.

    So are a comment and a lone surrogate.
    """
    rows = [sample(1, k, 1, tokens=True) for k in range(len(HOSTILE))]
    for row, text in zip(rows, HOSTILE):
        row[field] = [text, text, text] if field == "tokens" else text
    lines(tmp_path / "samples.jsonl", rows)
    samples.write(tmp_path, tmp_path / "samples.html")
    for text in HOSTILE if field == "set" else ["train"]:
        for shade in ("none", "values"):
            browser.open(tmp_path / "samples.html")
            browser.choose("set", text)
            browser.choose("shade", shade)
            assert browser.js("window.pwned") is None
            assert (
                browser.js("document.querySelectorAll('img, main script, main b > *').length") == 0
            )
            assert browser.js("document.scripts.length") == 2 and not browser.misdeeds()
    if field == "response":
        browser.choose("shade", "none")
        shown = browser.texts("pre")
        assert shown[:3] == HOSTILE[:3] and "HASH SCRIPT DATA" in shown[3]


def test_the_policy_runs_nothing_else(browser, page):
    """Were a text ever put in as HTML, its handler would still not run."""
    browser.open(page)
    browser.js(
        "document.body.insertAdjacentHTML('beforeend', "
        "'<img src=data:, onerror=\"window.pwned = 1\">')"
    )
    time.sleep(0.2)
    assert browser.js("window.pwned") is None


def test_ten_thousand_samples_do_not_freeze(browser, tmp_path):
    rows = [
        sample(step, p, i, right=i == 2)
        for step in range(1, 101)
        for p in range(4)
        for i in range(16)
    ]
    lines(tmp_path / "samples.jsonl", rows)
    lines(
        tmp_path / "eval_samples.jsonl",
        [sample(s, p, 0, name="eval") for s in (0, 9) for p in range(2500)],
    )
    samples.write(tmp_path, tmp_path / "samples.html", per_step=2500)
    assert len(embedded(tmp_path / "samples.html")["samples"]) == 10_000
    begin = time.time()
    browser.open(tmp_path / "samples.html")
    took = browser.js(
        "(() => { const t = performance.now(); document.forms[0].text.value = 'it is 3';"
        "document.forms[0].text.dispatchEvent(new Event('input', {bubbles: true}));"
        "return performance.now() - t })()"
    )
    assert took < 10_000 and time.time() - begin < 60
    assert browser.js("document.querySelectorAll('*').length") < 2000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_modes_are_readable(browser, page, scheme):
    """Text and background follow the mode of the reader.

    So does the bar of filters, which covers what scrolls below it.
    """
    browser(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    browser.open(page, "shade=advantages")
    bright = {"color": scheme == "dark", "backgroundColor": scheme == "light"}
    for name, expected in bright.items():
        colour = browser.js(f"getComputedStyle(document.forms[0]).{name}")
        levels = [int(x) for x in re.findall(r"\d+", colour)]
        assert len(levels) == 3 and (min(levels) > 200 if expected else max(levels) < 60), colour
    browser("Emulation.setEmulatedMedia", features=[])
