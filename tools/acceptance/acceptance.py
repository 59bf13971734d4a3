#!/usr/bin/env python3
"""Compares the parts of the architecture and of its training with their alternatives on one machine.

    acceptance.py data --corpus build/corpus --out build/acceptance/data
    acceptance.py run --cachalot build/cachalot --folder build/acceptance --jobs 2 --out results.jsonl
    acceptance.py report --results results.jsonl --table table.md --plot curves.svg

`data` makes the training data from what tools/train/corpus.py wrote. `run` trains the arms, the most
telling ones first, `--jobs` at once, one thread each, and stops after `--seconds` with what is done by then.
The results are the arms' logs, one JSON object per line with "arm" and "seed". `report` needs nothing else.
An arm is a run file of this folder plus settings; ARMS and ORDER say which. Standard library only.
"""
import argparse
import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
# AdamW's rates for matrices and tables, as factors of the schedule's peak (4e-3).
ADAM_RATES = (0.125, 0.25, 0.5, 1.0, 2.0)
# Those for tables: a row is hit rarely, so larger ones may be better.
TABLE_RATES = (0.5, 1.0, 2.0, 4.0, 8.0)
SINKHORN_RATES = (0.5, 2.0, 4.0)  # 1 is `base`
# Muon against AdamW on the matrices: without the tables, which learn most in so short a run whatever the matrices
# do, with both rates searched, in as many steps as `nano` makes in three minutes of its GPU (230 to 460).
MATRIX_RATES = (0.5, 1.0, 2.0, 4.0)
MATRICES = ["schedule.steps=400", "schedule.warmup_steps=25"]
NO_TABLES = ["engram_layer_ids=[]"]
NEEDLE_KEYS, NEEDLE_VALUES, NEEDLE_PAIRS, NEEDLE_ASKED, NEEDLE_DISTANCE, NEEDLE_NOISE = 16, 16, 8, 4, 64, 8
EXPORTED = ["quant.window=true", "quant.main=true", "quant.index=true", "quant.experts=true",
            "quant.engram=true", "quant.linears=true", "quant.plain=true"]
TUNE = ["schedule.steps=48", "schedule.peak=4e-4", "schedule.last=4e-5", "schedule.warmup_steps=1",
        "schedule.decay_begin=0.0", "objective.candidates=true"]


@dataclasses.dataclass
class Arm:
    file: str
    settings: list = dataclasses.field(default_factory=list)
    model: list = dataclasses.field(default_factory=list)  # added to the file's model.set
    after: str = ""  # the arm whose weights this one starts from
    evaluations: dict = dataclasses.field(default_factory=dict)  # name: flags of `cachalot eval`
    keeps: bool = False  # its state is needed by another arm


ARMS = {
    # The schedule in 0.8 of the steps.
    "base-short": Arm("text.toml", ["schedule.steps=128"]),
    "base": Arm("text.toml", evaluations={"zero_tables": ["--zero-tables"]}, keeps=True),
    **{f"adamw-{rate:g}": Arm("text.toml", ['optimizer.matrices="adamw"', f"optimizer.matrix_rate={rate}"])
       for rate in ADAM_RATES},
    **{f"adamw-tables-{rate:g}": Arm("text.toml", ['optimizer.tables="adamw"', f"optimizer.table_rate={rate}"])
       for rate in TABLE_RATES},
    **{f"sinkhorn-tables-{rate:g}": Arm("text.toml", [f"optimizer.table_rate={rate}"]) for rate in SINKHORN_RATES},
    **{f"matrices-muon-{rate:g}": Arm("text.toml", [*MATRICES, f"optimizer.matrix_rate={rate}"], NO_TABLES)
       for rate in MATRIX_RATES},
    **{f"matrices-adamw-{rate:g}":
       Arm("text.toml", [*MATRICES, 'optimizer.matrices="adamw"', f"optimizer.matrix_rate={rate}"], NO_TABLES)
       for rate in MATRIX_RATES},
    **{f"matrices-muon-short-{rate:g}":
       Arm("text.toml", [*MATRICES, "schedule.steps=320", f"optimizer.matrix_rate={rate}"], NO_TABLES)
       for rate in MATRIX_RATES},
    # Wider experts make up for Engram's projections: 1.41 M multiply-adds per token instead of 1.36 M.
    "no-engram": Arm("text.toml", model=["engram_layer_ids=[]", "moe_intermediate_size=96"]),
    "residual": Arm("text.toml", ['model.mixing="plain"'], ["hc_mult=1"]),
    "free-mixing": Arm("text.toml", ['model.mixing="free"']),
    "no-bias": Arm("text.toml", ["optimizer.bias_speed=0.0"]),
    # All entries are selected, so there is nothing for an indexer to learn.
    "dense": Arm("text.toml", ["objective.indexer=0.0"], ["index_topk=256"], keeps=True),
    "indexer": Arm("text.toml", ['model.stage="indexer"', "schedule.steps=200", "data.batch_tokens=512",
                                 "schedule.decay_begin=0.5", "run.evaluate_every=0"], ["index_topk=16"],
                   after="dense"),
    "tuned": Arm("text.toml", TUNE, after="base", evaluations={"exported": ["--exported"]}),
    "tuned-qat": Arm("text.toml", TUNE + EXPORTED, after="base", evaluations={"exported": ["--exported"]}),
    "needle": Arm("needle.toml"),
    "needle-window": Arm("needle.toml", model=["compress_ratios=[0,0,0,0,0]", "kv_source_layer_ids=[]",
                                               "index_source_layer_ids=[]"]),
}
FIRST = ["base", "needle", "dense", "no-engram", "adamw-0.5", "adamw-1", "adamw-2", "adamw-0.25", "base-short", "residual", "no-bias",
         "needle-window", "tuned", "tuned-qat", "indexer"]
ORDER = ([(arm, 1) for arm in FIRST] + [(arm, 2) for arm in FIRST] +
         [(arm, seed) for seed in (1, 2) for arm in ["free-mixing", "adamw-0.125"]] +
         [(f"adamw-tables-{rate:g}", seed) for seed in (1, 2) for rate in TABLE_RATES] +
         [(f"sinkhorn-tables-{rate:g}", seed) for seed in (1, 2) for rate in SINKHORN_RATES] +
         [(f"matrices-{update}-{rate:g}", seed) for seed in (1, 2) for update in ("muon", "adamw", "muon-short")
          for rate in MATRIX_RATES])


# Data. ------------------------------------------------------------------------------------------------

def needle(r):
    """Pairs, noise over NEEDLE_DISTANCE tokens, then some of the pairs again, whose values are learned.

    Pairs begin at even positions, so that a group of two tokens is a pair."""
    key, value = 4, 4 + NEEDLE_KEYS
    noise = value + NEEDLE_VALUES
    pairs = [(key + k, value + r.randrange(NEEDLE_VALUES)) for k in r.sample(range(NEEDLE_KEYS), NEEDLE_PAIRS)]
    tokens = [0, 2] + [t for pair in pairs for t in pair]
    tokens += [noise + r.randrange(NEEDLE_NOISE) for _ in range(NEEDLE_DISTANCE)]
    learn = [0] * len(tokens) + [0, 1] * NEEDLE_ASKED
    return {"tokens": tokens + [t for pair in r.sample(pairs, NEEDLE_ASKED) for t in pair], "learn": learn}


def make_data(args):
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", args.bytes), ("heldout", args.bytes // 10)):
        documents = [json.loads(line)["text"] for line in open(pathlib.Path(args.corpus) / f"{name}.jsonl")]
        random.Random(1).shuffle(documents)
        with open(out / f"text-{name}.jsonl", "w") as file:
            written = 0
            for text in documents:
                if written < size:
                    file.write(json.dumps({"text": text[:8192]}) + "\n")
                    written += len(text[:8192])
    for name, seed, count in (("train", 1, args.samples), ("heldout", 2, args.samples // 50)):
        r = random.Random(seed)
        with open(out / f"needle-{name}.jsonl", "w") as file:
            for _ in range(count):
                file.write(json.dumps(needle(r)) + "\n")


# Running. ---------------------------------------------------------------------------------------------

def model_set(path):
    """The strings of model.set in a run file of this folder."""
    text = path.read_text()
    if "\nset = [" not in text:
        return []
    return json.loads("[" + text.split("\nset = [")[1].split("]\n")[0].rstrip().rstrip(",") + "]")


def state_bytes(path):
    """Bytes of optimizer state of embedding, head and Engram tables in a saved state."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    total = 0
    for name, tensor in header.items():
        kind, _, weight = name.partition("/")
        if kind in ("first", "second") and (weight in ("embed.weight", "head.weight") or
                                            weight.endswith("engram.embed.weight")):
            total += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return total


class Runner:
    def __init__(self, args):
        self.args = args
        self.folder = pathlib.Path(args.folder).resolve()
        self.runs = self.folder / "runs"
        shutil.rmtree(self.runs, ignore_errors=True)
        self.runs.mkdir(parents=True)
        self.deadline = time.monotonic() + args.seconds
        self.running = {}  # (arm, seed): (process, log file, start)
        self.done = set()
        self.results = open(args.out, "w")

    def write(self, key, **fields):
        self.results.write(json.dumps({"arm": key[0], "seed": key[1], **fields}) + "\n")
        self.results.flush()

    def run_folder(self, key):
        return self.runs / f"{key[0]}-{key[1]}"

    def command(self, key):
        arm, seed = ARMS[key[0]], key[1]
        settings = list(arm.settings) + [f"model.seed={seed}", f'run.out="{self.run_folder(key)}"']
        if arm.model:
            settings.append("model.set=" + json.dumps(model_set(HERE / arm.file) + arm.model))
        if arm.after:
            settings += ['model.preset=""', f'model.from="{self.run_folder((arm.after, seed))}"']
        if self.args.steps:
            settings.append(f"schedule.steps={self.args.steps}")
        command = [self.args.cachalot, "train", str(HERE / arm.file)]
        for setting in settings:
            command += ["--set", setting]
        return command

    def environment(self):
        # A bundle has its libraries beside the program.
        library = pathlib.Path(self.args.cachalot).resolve().parent / "lib"
        path = f"{library}:{os.environ.get('LD_LIBRARY_PATH', '')}" if library.is_dir() else None
        return {**os.environ, "LD_LIBRARY_PATH": path} if path else dict(os.environ)

    def start(self, key):
        log = open(self.runs / f"{key[0]}-{key[1]}.stderr", "w+")
        process = subprocess.Popen(self.command(key), cwd=self.folder, env=self.environment(),
                                   stdout=log, stderr=log)
        self.running[key] = (process, log, time.monotonic())

    def collect(self, key):
        """Copies an arm's log into the results; what it said on its way."""
        log = self.run_folder(key) / "log.jsonl"
        for line in log.read_text().splitlines() if log.exists() else []:
            try:
                self.write(key, **json.loads(line))
            except json.JSONDecodeError:
                break  # the line was being written
        stderr = self.running.pop(key)[1]
        stderr.seek(0)
        return stderr.read().strip()

    def finish(self, key):
        process, _, start = self.running[key]
        seconds = round(time.monotonic() - start, 1)
        text = self.collect(key)
        if process.returncode == 0:
            self.measure(key)
            self.done.add(key)
        else:
            print(f"{key[0]}/{key[1]}: {text}", file=sys.stderr)
        self.write(key, done=process.returncode == 0, process_seconds=seconds,
                   message=text if process.returncode else "")

    def measure(self, key):
        """What is measured after training."""
        arm, folder = ARMS[key[0]], self.run_folder(key)
        for name, flags in arm.evaluations.items():
            out = subprocess.run([self.args.cachalot, "eval", str(folder), "--data", "data/text-heldout.jsonl",
                                  "--sequence", "256", "--tokens", "10000", "--threads", "1", "--json", *flags],
                                 cwd=self.folder, env=self.environment(), capture_output=True, text=True)
            if out.returncode == 0:
                self.write(key, evaluation=name, **json.loads(out.stdout))
            else:
                print(f"{key[0]}/{key[1]} {name}: {out.stderr}", file=sys.stderr)
        for state in folder.glob("state-*.safetensors"):
            self.write(key, table_state_bytes=state_bytes(state))
            if not arm.keeps:
                state.unlink()

    def ready(self):
        for key in self.waiting:
            before = ARMS[key[0]].after
            if not before or (before, key[1]) in self.done:
                return key
        return None

    def progress(self):
        parts = []
        for key in self.running:
            log = self.run_folder(key) / "log.jsonl"
            lines = log.read_bytes().count(b"\n") if log.exists() else 0
            parts.append(f"{key[0]}/{key[1]} {lines}")
        left = max(0, self.deadline - time.monotonic())
        print(f"{int(left // 60)}:{int(left % 60):02} left, {len(self.done)} done, {len(self.waiting)} waiting; "
              + ", ".join(parts), file=sys.stderr, flush=True)

    def run(self):
        only = self.args.only.split(",") if self.args.only else None
        self.waiting = [key for key in ORDER if only is None or key[0] in only]
        self.write(("machine", 0), processors=os.cpu_count(), jobs=self.args.jobs, model=processor_name())
        next_report = 0.0
        while (self.waiting or self.running) and time.monotonic() < self.deadline:
            while len(self.running) < self.args.jobs and (key := self.ready()):
                self.waiting.remove(key)
                self.start(key)
            if not self.running:
                break  # what waits starts from an arm that failed
            for key, (process, *_) in list(self.running.items()):
                if process.poll() is not None:
                    self.finish(key)
            if time.monotonic() > next_report:
                self.progress()
                next_report = time.monotonic() + 15
            time.sleep(0.1)
        for key, (process, *_) in list(self.running.items()):
            process.kill()
            process.wait()
            self.collect(key)
        self.results.close()
        shutil.rmtree(self.runs)


def processor_name():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return ""


# Report. ----------------------------------------------------------------------------------------------

class Results:
    def __init__(self, paths):
        self.steps, self.heldout, self.evaluation, self.done, self.bytes = {}, {}, {}, set(), {}
        self.machines = []
        for line in (line for path in paths for line in open(path)):
            record = json.loads(line)
            key = (record.pop("arm"), record.pop("seed"))
            if key[0] == "machine":
                self.machines.append(record)
            elif "evaluation" in record:
                self.evaluation[key + (record["evaluation"],)] = record
            elif "done" in record:
                if record["done"]:
                    self.done.add(key)
            elif "table_state_bytes" in record:
                self.bytes[key] = record["table_state_bytes"]
            elif "heldout_loss" in record:
                self.heldout.setdefault(key, []).append(record)
            else:
                self.steps.setdefault(key, []).append(record)

    def seeds(self, *arms):
        return [s for s in (1, 2) if all((arm, s) in self.done for arm in arms)]

    def final(self, arm, seed):
        return self.heldout[arm, seed][-1]["heldout_loss"]

    def mean(self, arm, seeds):
        return sum(self.final(arm, s) for s in seeds) / len(seeds)

    def best(self, prefix, rates):
        """The arm with the lowest mean final loss, over the seeds that all rates have; those seeds."""
        arms = [f"{prefix}-{rate:g}" for rate in rates if self.seeds(f"{prefix}-{rate:g}")]
        seeds = self.seeds(*arms) if arms else []
        return (min(arms, key=lambda arm: self.mean(arm, seeds)), seeds) if seeds else (None, [])

    def step_of(self, arm, seed, loss):
        """The step, interpolated between evaluations, at which held-out loss reaches `loss`."""
        before = None
        for record in self.heldout[arm, seed]:
            now = (record["step"], record["heldout_loss"])
            if now[1] <= loss:
                if before is None:
                    return now[0]
                return before[0] + (now[0] - before[0]) * (before[1] - loss) / (before[1] - now[1])
            before = now
        return None


class Table:
    def __init__(self):
        self.rows = []

    def row(self, comparison, measured, threshold, value, good):
        """`value` is text; `good` None: reported, without a threshold."""
        verdict = "" if good is None else "reached" if good else "**missed**"
        self.rows.append(f"| {comparison} | {measured} | {value} | {threshold} | {verdict} |")

    def each(self, comparison, measured, threshold, seeds, value, good, form="{:.3f}"):
        """One value per seed; all must be good."""
        values = [value(s) for s in seeds]
        if values:
            self.row(comparison, measured, threshold, " / ".join(form.format(v) for v in values),
                     None if good is None else all(good(v) for v in values))
        else:
            self.row(comparison, measured, threshold, "not run", None)

    def text(self):
        return "\n".join(["| comparison | measured | value per seed | threshold | |", "|---|---|---|---|---|"] +
                         self.rows) + "\n"


def tail(records, key, count):
    values = [r[key] for r in records[-count:]]
    return sum(values) / len(values)


def muon_rows(r, t, name, muon, short, adam, seeds):
    """`short` is Muon with its whole schedule in 0.8 of the steps."""
    t.each(name, "share of the steps at which Muon has AdamW's final held-out loss", "<= 0.80", seeds,
           lambda s: (r.step_of(muon, s, r.final(adam, s)) or math.inf) / r.steps[muon, s][-1]["step"],
           lambda v: v <= 0.8, "{:.3f}")
    t.each(name, "final held-out loss of Muon in 0.8 of the steps, less AdamW's, nats", "<= 0",
           [s for s in seeds if s in r.seeds(short)], lambda s: r.final(short, s) - r.final(adam, s),
           lambda v: v <= 0, "{:+.3f}")
    t.each(name, "final held-out loss, Muon less AdamW, nats", "", seeds,
           lambda s: r.final(muon, s) - r.final(adam, s), None, "{:+.3f}")


def build_table(r):
    t = Table()
    half = lambda arm, s: r.steps[arm, s][len(r.steps[arm, s]) // 2:]
    base = r.seeds("base")
    adam, seeds = r.best("adamw", ADAM_RATES)
    searched = lambda prefix, rates: len([x for x in rates if r.seeds(f"{prefix}-{x:g}")])
    muon_rows(r, t, f"Muon against AdamW (rates: {searched('adamw', ADAM_RATES)})", "base", "base-short", adam,
              [s for s in seeds if s in base])
    muon, seeds = r.best("matrices-muon", MATRIX_RATES)
    adam, adam_seeds = r.best("matrices-adamw", MATRIX_RATES)
    rates = " and ".join(str(searched(f"matrices-{update}", MATRIX_RATES)) for update in ("muon", "adamw"))
    muon_rows(r, t, f"Muon against AdamW without tables (rates: {rates})", muon,
              muon and muon.replace("muon-", "muon-short-"), adam, [s for s in seeds if s in adam_seeds])
    tables, seeds = r.best("adamw-tables", TABLE_RATES)
    sinkhorn, sinkhorn_seeds = r.best("sinkhorn-tables", SINKHORN_RATES)
    if not sinkhorn or r.mean("base", sinkhorn_seeds) < r.mean(sinkhorn, sinkhorn_seeds):
        sinkhorn, sinkhorn_seeds = "base", base
    seeds = [s for s in seeds if s in sinkhorn_seeds]
    name = ("Sinkhorn update against AdamW on embedding, head and Engram tables "
            f"(rates: {searched('adamw-tables', TABLE_RATES)})")
    t.each(name, "final held-out loss, Sinkhorn less AdamW, nats", "<= 0.01", seeds,
           lambda s: r.final(sinkhorn, s) - r.final(tables, s),
           # A rate that was not searched may be the better one.
           (lambda v: v <= 0.01) if searched("adamw-tables", TABLE_RATES) == len(TABLE_RATES) else None, "{:+.3f}")
    t.each(name, "optimizer state of these tensors, Sinkhorn over AdamW", "0.5", seeds,
           lambda s: r.bytes[sinkhorn, s] / r.bytes[tables, s], lambda v: v == 0.5, "{:.2f}")
    t.each("Engram on against off, off with more multiply-adds", "final held-out loss, off less on, nats", ">= 0.01",
           r.seeds("base", "no-engram"), lambda s: r.final("no-engram", s) - r.final("base", s),
           lambda v: v >= 0.01, "{:+.3f}")
    t.each("Engram", "held-out loss with tables of zeros, less that with them, nats", ">= 0.02", base,
           lambda s: r.evaluation["base", s, "zero_tables"]["loss"] - r.final("base", s),
           lambda v: v >= 0.02, "{:+.3f}")
    name = "mHC against a plain residual"
    gain = lambda arm, key: lambda s: max(x[key] for x in r.steps[arm, s])
    t.each(name, "forward gain of the product of combs, largest of the run, less 1", "<= 1e-4", base,
           lambda s: gain("base", "gain")(s) - 1, lambda v: v <= 1e-4, "{:.1e}")
    t.each(name, "backward gain, largest of the run", "", base, gain("base", "gain_back"), None)
    seeds = r.seeds("base", "residual")
    t.each(name, "final held-out loss, mHC less residual, nats", "<= 0.02", seeds,
           lambda s: r.final("base", s) - r.final("residual", s), lambda v: v <= 0.02, "{:+.3f}")
    norm = lambda arm: lambda s: max(x["gradient_norm"] for x in half(arm, s))
    t.each(name, "largest gradient norm of the second half, mHC over residual", "", seeds,
           lambda s: norm("base")(s) / norm("residual")(s), None, "{:.2f}")
    name = "mHC against free mixing"
    # Gains need no finished run: that free mixing exceeds mHC's largest one shows on the way.
    seeds = [s for s in base if ("free-mixing", s) in r.steps]
    t.each(name, "steps of free mixing that were run", "", seeds, lambda s: len(r.steps["free-mixing", s]), None, "{}")
    t.each(name, "forward gain of free mixing in them", "above mHC's", seeds, gain("free-mixing", "gain"),
           lambda v: v > 1.0001, "{:.1f}")
    t.each(name, "backward gain in them, over the largest of mHC", "> 1", seeds,
           lambda s: gain("free-mixing", "gain_back")(s) / gain("base", "gain_back")(s), lambda v: v > 1, "{:.1f}")
    seeds = r.seeds("base", "free-mixing")
    t.each(name, "final held-out loss, mHC less free mixing, nats", "", seeds,
           lambda s: r.final("base", s) - r.final("free-mixing", s), None, "{:+.3f}")
    name = "Router bias on against off"
    violation = lambda arm: lambda s: sum(x["violation"] for x in half(arm, s)) / len(half(arm, s))
    t.each(name, "max load / mean load - 1 on, mean of layers and of the second half", "< 0.5", base,
           violation("base"), lambda v: v < 0.5)
    t.each(name, "the same, off", "", r.seeds("no-bias"), violation("no-bias"), None)
    t.each(name, "experts without a row in any step of the second half, on", "0", base,
           lambda s: min(x["idle_experts"] for x in half("base", s)), lambda v: v == 0, "{}")
    t.each(name, "final held-out loss, on less off, nats", "", r.seeds("base", "no-bias"),
           lambda s: r.final("base", s) - r.final("no-bias", s), None, "{:+.3f}")
    t.each("Sparse selection against dense attention (16 of up to 256 entries)",
           "final held-out loss, sparse less dense, nats", "<= 0.03", r.seeds("base", "dense"),
           lambda s: r.final("base", s) - r.final("dense", s), lambda v: v <= 0.03, "{:+.3f}")
    name = f"Recall over {NEEDLE_DISTANCE} tokens with a window of 8"
    right = lambda arm: lambda s: r.heldout[arm, s][-1]["heldout_right"] / r.heldout[arm, s][-1]["heldout_targets"]
    t.each(name, "right values with selection", ">= 0.95", r.seeds("needle"), right("needle"), lambda v: v >= 0.95)
    t.each(name, "right values with the window alone", f"chance, {1 / NEEDLE_VALUES:.3f}; <= 0.1",
           r.seeds("needle-window"), right("needle-window"), lambda v: v <= 0.1)
    seeds = r.seeds("indexer")
    name = "Indexer alone on a frozen backbone of dense attention, 200 steps"
    t.each(name, "KL divergence at the end over that at the start", "<= 0.5", seeds,
           lambda s: tail(r.steps["indexer", s], "indexer", 10) / tail(r.steps["indexer", s][:3], "indexer", 3),
           lambda v: v <= 0.5, "{:.2f}")
    t.each(name, "attention that the selected entries get, of all entries'", ">= 0.9", seeds,
           lambda s: tail(r.steps["indexer", s], "selected_share", 20), lambda v: v >= 0.9)
    t.each(name, "the same, of what as many best entries get", "", seeds,
           lambda s: tail(r.steps["indexer", s], "selected_recall", 20), None)
    name = "Quantization-aware tuning against rounding afterwards"
    seeds = r.seeds("tuned", "tuned-qat")
    exported = lambda arm, s: r.evaluation[arm, s, "exported"]["loss"]
    t.each(name, "exported held-out loss after tuning with rounding, less unrounded loss without, nats", "<= 0.01",
           seeds, lambda s: exported("tuned-qat", s) - r.final("tuned", s), lambda v: v <= 0.01, "{:+.4f}")
    t.each(name, "that increase over the increase by rounding afterwards", "< 1", seeds,
           lambda s: (exported("tuned-qat", s) - r.final("tuned", s)) /
           (exported("tuned", s) - r.final("tuned", s)), lambda v: v < 1, "{:.2f}")
    t.each(name, "increase by rounding afterwards, nats", "", seeds,
           lambda s: exported("tuned", s) - r.final("tuned", s), None, "{:+.4f}")
    t.each("Range of a compressed row", "largest absolute value, of at most 5.7 times the largest norm weight",
           "", base, gain("base", "max_latent"), None, "{:.2f}")
    return t.text()


COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 430, 250, 52, 12, 30, 34


def panels(r):
    adam, _ = r.best("adamw", ADAM_RATES)
    tables, _ = r.best("adamw-tables", TABLE_RATES)
    loss = lambda arm, s: [(x["step"], x["heldout_loss"]) for x in r.heldout.get((arm, s), [])]
    right = lambda arm, s: [(x["step"], x["heldout_right"] / x["heldout_targets"]) for x in r.heldout.get((arm, s), [])]

    def smooth(field):
        def points(arm, s):
            records = r.steps.get((arm, s), [])
            return [(records[i]["step"], sum(x[field] for x in records[max(0, i - 4):i + 1]) / min(i + 1, 5))
                    for i in range(0, len(records), 2)]
        return points

    held = "held-out loss, nats per byte"
    muon, _ = r.best("matrices-muon", MATRIX_RATES)
    matrices_adam, _ = r.best("matrices-adamw", MATRIX_RATES)
    return [("Muon and AdamW: " + held, loss, [("base", "Muon"), (adam, "AdamW, best rate")]),
            ("without tables: " + held, loss, [(muon, "Muon, best rate"), (matrices_adam, "AdamW, best rate")]),
            ("tables: " + held, loss, [("base", "Sinkhorn"), (tables, "AdamW, best rate")]),
            ("Engram: " + held, loss, [("base", "on"), ("no-engram", "off")]),
            ("hyper-connections: " + held, loss,
             [("base", "mHC"), ("residual", "plain residual"), ("free-mixing", "free mixing")]),
            ("gain of the combs, backward", smooth("gain_back"), [("base", "mHC"), ("free-mixing", "free mixing")]),
            ("expert load: max / mean - 1", smooth("violation"), [("base", "bias on"), ("no-bias", "bias off")]),
            ("attention: " + held, loss, [("base", "16 selected"), ("dense", "all")]),
            ("recall beyond the window: right", right, [("needle", "selection"), ("needle-window", "window alone")]),
            ("indexer on a frozen backbone: KL", smooth("indexer"), [("indexer", "KL, nats")]),
            ("tuning: " + held, loss, [("tuned", "unrounded"), ("tuned-qat", "rounded")])]


def draw(title, points_of, curves, x0, y0):
    drawn = [(i, s, name, points_of(arm, s)) for i, (arm, name) in enumerate(curves) if arm for s in (1, 2)]
    drawn = [d for d in drawn if d[3]]
    # The steep start would leave no room for the differences.
    shown = [y for *_, points in drawn for x, y in points if x >= 0.1 * points[-1][0]]
    low, high = min(shown), max(shown)
    high = max(high, low + 1e-9)
    last = max(points[-1][0] for *_, points in drawn)
    left, right, top, bottom = x0 + LEFT, x0 + WIDTH - RIGHT, y0 + TOP, y0 + HEIGHT - BOTTOM
    svg = [f'<rect x="{left}" y="{top}" width="{right - left}" height="{bottom - top}" fill="none" stroke="#888"/>',
           f'<text x="{left}" y="{top - 9}">{title}</text>']
    for share in (0, 0.5, 1):
        y = bottom - share * (bottom - top)
        svg.append(f'<text x="{left - 5}" y="{y + 4:.0f}" text-anchor="end">{low + share * (high - low):.3g}</text>')
        svg.append(f'<text x="{left + share * (right - left):.0f}" y="{bottom + 15}" text-anchor="middle">'
                   f'{share * last:.0f}</text>')
    for i, seed, name, points in drawn:
        path = " ".join(f"{left + x / last * (right - left):.1f},{bottom - (y - low) / (high - low) * (bottom - top):.1f}"
                        for x, y in points if low <= y <= high)
        dash = ' stroke-dasharray="4 3"' if seed == 2 else ""
        svg.append(f'<polyline points="{path}" fill="none" stroke="{COLORS[i]}"{dash}/>')
    for i, name in sorted({(i, name) for i, _, name, _ in drawn}):
        svg.append(f'<text x="{right - 8}" y="{top + 16 + 15 * i}" fill="{COLORS[i]}" text-anchor="end">{name}</text>')
    return svg


def build_plot(r):
    # A panel without the arm to compare with says nothing.
    items = [p for p in panels(r) if all(arm and any(p[1](arm, s) for s in (1, 2)) for arm, _ in p[2][:2])]
    rows = (len(items) + 1) // 2
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{rows * HEIGHT}" '
           'font-family="sans-serif" font-size="11">', '<rect width="100%" height="100%" fill="white"/>']
    for i, (title, points, curves) in enumerate(items):
        svg += draw(title, points, curves, i % 2 * WIDTH, i // 2 * HEIGHT)
    return "\n".join(svg + ["</svg>"]) + "\n"


def report(args):
    results = Results(args.results)
    table = build_table(results)
    pathlib.Path(args.table).write_text(table)
    pathlib.Path(args.plot).write_text(build_plot(results))
    print(f"{results.machines}, {len(results.done)} of {len(ORDER)} arms\n{table}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    data = commands.add_parser("data", help="make the data")
    data.add_argument("--corpus", required=True, help="folder with train.jsonl and heldout.jsonl")
    data.add_argument("--out", required=True)
    data.add_argument("--bytes", type=int, default=1_000_000)
    data.add_argument("--samples", type=int, default=14000, help="of the recall task")
    data.set_defaults(action=make_data)
    run = commands.add_parser("run", help="train the arms")
    run.add_argument("--cachalot", required=True)
    run.add_argument("--folder", required=True, help="holds data/; runs are kept here while they are needed")
    run.add_argument("--out", required=True, help="results as JSONL")
    run.add_argument("--jobs", type=int, default=2)
    run.add_argument("--seconds", type=float, default=1e9)
    run.add_argument("--only", help="arms, separated by commas")
    run.add_argument("--steps", type=int, help="of every arm, to try them")
    run.set_defaults(action=lambda args: Runner(args).run())
    show = commands.add_parser("report", help="table and plot of the results")
    show.add_argument("--results", required=True, nargs="+", help="of one or several runs")
    show.add_argument("--table", required=True)
    show.add_argument("--plot", required=True)
    show.set_defaults(action=report)
    args = parser.parse_args()
    if hasattr(args, "cachalot"):
        args.cachalot = str(pathlib.Path(args.cachalot).resolve())
    args.action(args)


if __name__ == "__main__":
    main()
