"""What a run tells its user: metrics of a step, evaluations, samples, the result; in files, and in lines on the screen.

Owned by rank 0. metrics.jsonl has a line a step, samples.jsonl every training sample, eval.jsonl a line per evaluation
and set, eval_samples.jsonl its answers. A full disk costs neither a line nor the run: lines wait in memory.
"""
import contextlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import deepspeed
import psutil
import torch
import torch.distributed as dist
import transformers
from tqdm import tqdm

import ckpt
from tools import check, metrics, plot


def sample_lines(records: list[dict], problems: list, step: int, name: str):
    """A JSON object per sample: the problem, the response and its verdict."""
    for r in records:
        problem = problems[r["problem"]]
        yield {"step": step, "set": name, "problem": problem.index, "question": problem.question,
               "label": problem.label, "index": r["index"], "response": r["text"], "reward": r["reward"],
               "finish_reason": r["finish_reason"], "length": len(r["response_ids"])}


def progress(items, name: str, **settings) -> tqdm:
    """A bar on rank 0's terminal, gone when it is done; nothing elsewhere."""
    return tqdm(items, name, leave=False, disable=dist.get_rank() > 0 or None, **settings)


def elapsed() -> float:
    """Seconds since this process began: its imports take 8 of them."""
    return time.time() - psutil.Process().create_time()


class Clock:
    """Seconds and memory per phase of a step: `with clock("rollout"): ...`; seconds add up over repeated phases."""
    phase, moved = "loading", 0  # of whichever clock: for the message of an error; bytes that --offload has moved

    def __init__(self):
        self.seconds, self.memory, self.start, self.wait, self.lost = {}, {}, time.perf_counter(), 0.0, 0
        self.comms, self.gb = {}, 0.0
        metrics.communication()  # what came between the steps is dropped
        metrics.memory()

    @contextlib.contextmanager
    def __call__(self, phase: str):
        Clock.phase, begin = phase, time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        self.memory[phase] = max(self.memory.get(phase, 0.0), metrics.memory())
        seconds, gb = metrics.communication()
        self.comms[phase], self.gb = self.comms.get(phase, 0.0) + seconds, self.gb + gb


def token_fields(k: int, batch, tokenizer) -> dict[str, list]:
    """Sample k token by token: texts, and what is known of each (values, advantages, the sampler's log-probs)."""
    part = slice(int(batch.start[k]), int(batch.start[k] + batch.length[k]))
    fields = {"tokens": [tokenizer.decode([i]) for i in batch.response_ids[k]]}
    for key in ("values", "advantages", "logprobs"):
        if key in batch.tokens:
            fields[key] = [round(x, 4) for x in batch.tokens[key][part].tolist()]
    return fields


def quiet(path: Path) -> None:
    """What libraries write from now on goes to run.log; print and bars stay on the screen.

    They hold on to the old streams or write to descriptors 1 and 2, which change here; the screen gets new ones."""
    screen, errors, log = os.dup(1), os.dup(2), os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    show, old = warnings.showwarning, sys.stderr
    warnings.showwarning = lambda message, kind, file, line, *_: show(message, kind, file, line, old)
    sys.stdout, sys.stderr = os.fdopen(screen, "w", buffering=1), os.fdopen(errors, "w", buffering=1)

    def hook(error) -> None:
        with contextlib.suppress(OSError):  # a full disk, of which TensorBoard's thread has just died
            traceback.print_exception(error.exc_value, file=old)

    threading.excepthook = hook
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def tracker(cfg, run_dir: Path, step: int):
    """--log_with: TensorBoard's events in RUN/tensorboard, or Weights & Biases; None. Raises ConfigError."""
    from accelerate import PartialState, tracking  # here: eval-only runs need none

    if cfg.log_with == "none":
        return None
    PartialState()  # for the trackers' own log; it joins the process group that is there
    made = (tracking.WandBTracker("nanoorz", group=run_dir.name, name=f"{run_dir.name} from step {step}",
                                  dir=str(run_dir), config=vars(cfg)) if cfg.log_with == "wandb" else
            tracking.TensorBoardTracker("", str(run_dir / "tensorboard"), purge_step=step + 1))
    try:
        made.start()
    except Exception as error:  # of wandb's own kinds: not logged in, no network
        raise check.ConfigError(f"--log_with {cfg.log_with}: {' '.join(str(error).split())[:300]}") from error
    return made


class RunLog:
    """The files of a run folder but for checkpoints; lines that do not fit on the disk wait for the next write."""
    def __init__(self, run_dir: Path, tokenizer):
        self.run_dir, self.tokenizer = run_dir, tokenizer
        self.waiting, self.norms, self.tracker, self.took = {}, [], None, 0.0

    def start(self, step: int, marks: dict[str, int] | None, cfg, world: int, device=None, matrices=None) -> None:
        """Starts the tracker, cuts the logs back to the state that the run goes on from, writes config.json."""
        if device:
            self.matrices, self.peak = matrices, world * metrics.matmul_peak(device, cfg.bf16)
            self.tracker = tracker(cfg, self.run_dir, step)
        ckpt.rewind(self.run_dir, step, marks)
        (self.run_dir / "result.json").unlink(missing_ok=True)  # it speaks of a run that goes on now
        settings = vars(cfg) | {"world": world, "versions": check.versions()}
        self.write("config.json", settings)
        if cfg.log_comms:
            deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False)

    def write(self, name: str, value: dict) -> None:
        """Under its name whole or not at all: half a result would look like the end of a run."""
        (part := self.run_dir / f"{name}.part").write_text(json.dumps(value, indent=1))
        part.replace(self.run_dir / name)

    def append(self, name: str, lines) -> None:
        self.waiting.setdefault(name, []).extend(json.dumps(line) + "\n" for line in lines)
        self.flush()

    def flush(self) -> None:
        for name, lines in self.waiting.items():
            path = self.run_dir / name
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.writelines(lines)
                lines.clear()
            except OSError as error:
                if path.exists():
                    os.truncate(path, size)  # no half line
                print(f"WARNING: {path}: {error.strerror}; {len(lines)} line(s) wait", file=sys.stderr, flush=True)

    def track(self, line: dict, step: int, histograms: dict | None = None) -> None:
        """The numbers of a line to the tracker. TensorBoard's writing thread does not survive a full disk: the tracker
        is given up then, aloud; metrics.jsonl has everything."""
        try:
            if self.tracker:
                self.tracker.log({key: x for key, x in line.items() if isinstance(x, (int, float))}, step=step)
            for name, values in (histograms or {}).items() if self.tracker else ():
                if self.tracker.name == "tensorboard":
                    self.tracker.tracker.add_histogram(name, values, step)
                else:
                    self.tracker.log({name: importlib.import_module("wandb").Histogram(values)}, step=step)
        except OSError as error:
            self.tracker = None
            print(f"WARNING: no more events for the tracker: {error}", file=sys.stderr, flush=True)

    def step(self, records, problems, batch, learned: dict, step: int, total_steps: int, clock, cfg) -> None:
        """A finished step: metrics, samples, a line on the screen. What that takes is in the next step's line."""
        begin = time.perf_counter()
        line = {"step": step} | metrics.rollout_metrics(records, batch, cfg.generate_max_len) | learned
        tokens, seconds = sum(batch.size), time.perf_counter() - clock.start
        line |= metrics.expansion(records, cfg) if cfg.first_stage else {}
        line |= {
            "reward_lost": clock.lost, "seconds_waited": clock.wait, "seconds": seconds,
            "seconds_report": self.took,
            "tokens_per_second": tokens / seconds,
            "mfu": metrics.mfu(tokens, learned, self.matrices, clock.seconds, cfg, self.peak)} | {
            f"seconds_{phase}": value for phase, value in clock.seconds.items()}
        line |= {f"memory_{phase}": value for phase, value in clock.memory.items()}
        line |= {"offload_gb": Clock.moved / 2**30} if cfg.offload == "idle" else {}
        if cfg.log_comms:
            line |= {f"communication_seconds_{phase}": value for phase, value in clock.comms.items() if value}
            line["communication_gb"] = clock.gb
        Clock.moved = 0
        self.append("metrics.jsonl", [line])
        lengths = {"right": batch.length[batch.rewards > 0], "wrong": batch.length[batch.rewards <= 0]}
        self.track(line, step, {f"length_{name}": x for name, x in lengths.items() if len(x)})
        lines = enumerate(sample_lines(records, problems, step, "train"))
        self.append("samples.jsonl", (sample | (token_fields(k, batch, self.tokenizer) if k < cfg.log_tokens else {})
                                      for k, sample in lines))
        phases = "  ".join(f"{phase} {value:.1f}" for phase, value in clock.seconds.items() if value >= 0.05)
        print(f"step {step}/{total_steps}  reward {line['reward']:.3f}  length {line['response_length']:.1f}  "
              f"{phases}  {seconds:.1f} s", flush=True)
        for sign in metrics.health(line, self.norms):
            print(f"  look: {sign}", flush=True)
        self.norms += [line["policy_grad_norm"]] * (line["policy_grad_norm"] > 0)  # 0: no step was taken
        if cfg.save_interval and step % cfg.save_interval == 0:
            plot.draw([self.run_dir], self.run_dir / "curves.png")
        self.took = time.perf_counter() - begin

    def evaluation(self, name: str, records, problems, n: int, step: int) -> None:
        """An evaluated set: a line for it, its answers, a line on the screen."""
        line = metrics.evaluation_line(name, records, problems, n, step)
        self.append("eval_samples.jsonl", sample_lines(records, problems, step, name))
        self.append("eval.jsonl", [line])
        self.track({f"{name}/{key}": x for key, x in line.items() if isinstance(x, float)}, step)
        best = f"  pass@{n} {line[f'pass@{n}']:.3f}" if n > 1 else ""
        print(f"step {step}  {name}: accuracy {line['accuracy']:.3f} +- {line['stderr']:.3f}{best}  length "
              f"{line['length']:.1f}  truncated {line['truncated']:.3f}", flush=True)

    def table(self, cfg) -> None:
        """--eval_only: all sets side by side, and result.json with the settings and versions that made them."""
        lines = [json.loads(line) for line in (self.run_dir / "eval.jsonl").open()]
        columns = [c for c in lines[0] if c not in ("step", "set")]
        for row in (["set", *columns], *([line["set"], *(line[c] for c in columns)] for line in lines)):
            print("  ".join(f"{x:>10.4f}" if isinstance(x, float) else f"{x!s:>10}" for x in row), flush=True)
        self.write("result.json", {"sets": lines, "config": vars(cfg), "versions": check.versions(),
                                   "wall_seconds": elapsed()})

    def result(self, base_seconds: float, cfg, steps: int, demo: bool) -> None:
        """result.json and a line on the screen: the first against the last evaluation of the first set."""
        lines = [json.loads(line) for line in (self.run_dir / "eval.jsonl").open()] if cfg.eval_data else [{}]
        lines = [line for line in lines if line.get("set") == lines[0].get("set")]
        result = {f"{key}_before": lines[0].get(key) for key in ("accuracy", "length")}
        result |= {f"{key}_after": lines[-1].get(key) for key in ("accuracy", "length")}
        result |= {"steps": steps, "wall_seconds": elapsed(), "base_model_seconds": base_seconds,
                   "seed": cfg.seed, "versions": check.versions()}
        self.write("result.json", result)
        print(f"{steps} steps in {result['wall_seconds']:.0f} s; everything is in {self.run_dir}", flush=True)
        if demo:
            show_demo(self.run_dir)

    def close(self) -> None:
        """Hands the tracker what it still holds: nothing else would, since the process leaves by os._exit. Draws what
        there is, however the run ended."""
        with contextlib.suppress(OSError):  # a full disk
            if self.tracker:
                self.tracker.finish()
        with contextlib.suppress(OSError):
            if self.took:  # so steps were reported, and by this rank
                plot.draw([self.run_dir], self.run_dir / "curves.png")


def show_demo(run_dir: Path) -> None:
    """Prints what a run learnt: held-out accuracy and length before and after, and one problem answered twice."""
    result = json.loads((run_dir / "result.json").read_text())
    print(f"held out: accuracy {result['accuracy_before']:.3f} -> {result['accuracy_after']:.3f}, response length "
          f"{result['length_before']:.1f} -> {result['length_after']:.1f} tokens")
    answers = [json.loads(line) for line in (run_dir / "eval_samples.jsonl").open()]
    wrong = next((a for a in answers if not a["reward"]), answers[0])
    for name, answer in (("before", wrong), ("after ", [a for a in answers if a["problem"] == wrong["problem"]][-1])):
        print(f"{name}: {answer['question']}<think>{answer['response']}", flush=True)
