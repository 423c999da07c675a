"""Evaluate a checkpoint on tasks of EleutherAI's lm-evaluation-harness (pip install lm_eval).

    python tutorials/harness.py                                           the newest run, ten tasks
    python tutorials/harness.py --tasks lambada_openai piqa --limit 100   by name, from the hub
    python tutorials/harness.py --tasks my_task --include_path folder/    folder/my_task.yaml

The harness asks a model for three things: how probable a continuation is after a context, how
probable a whole text is, and what the model writes. `Adapter` answers with the probabilities of
`model.log_probs`: renormalised over the real tokens and calibrated by τ.
"""

import argparse
import difflib
import json
import math
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # mhf.py and support/ stand there
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import mhf  # noqa: E402
from support import tokenizer as tokenizers  # noqa: E402

try:
    from lm_eval.api.model import LM
    from lm_eval.utils import make_table
except ImportError:  # --help works without
    LM = object

PAPER = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande",
         "openbookqa", "boolq", "record", "sciq"]  # fmt: skip
GENERATION = ["until", "max_gen_toks", "max_new_tokens", "do_sample",
              "temperature", "top_k", "top_p"]  # fmt: skip
SHORTENED = "the context is too long and lost its beginning"
APART = "the continuation shares its only token with the context and was encoded apart"


@torch.inference_mode()
def score(model, pairs):
    """Pairs (context, continuation) of token ids -> [(log P of the continuation, is it greedy)].

    A context that is too long loses its beginning. Greedy is the token with the highest score, of
    equal scores the one with the lowest id. The scores themselves are compared, because rounding
    can make two log probabilities equal.
    """
    window, device = model.config.max_position_embeddings, model.device
    rows = [torch.tensor([*before, *after][-window - 1 :]) for before, after in pairs]
    lengths = [len(after) for _, after in pairs]
    ids = pad_sequence(rows, batch_first=True).to(device)  # (N, T + 1); what pads comes last
    ends, place = torch.tensor([[len(row)] for row in rows]), torch.arange(ids.shape[1])
    asked = (place >= ends - torch.tensor(lengths)[:, None]) & (place < ends)
    asked = asked[:, 1:].to(device)  # (N, T)
    h, targets = model(ids[:, :-1])[asked], ids[:, 1:][asked]  # (M, D), (M,)
    nats, greedy = [], []
    size = max(1, 2**25 // max(model.config.vocab_size, len(model.model.embed_tokens.weight)))
    for states, target in zip(h.split(size), targets.split(size)):
        scores = model.token_scores(states)  # (size, V)
        greedy.append(scores.argmax(-1) == target)  # (size,)
        scores = scores / model.config.calibration
        nats.append(F.cross_entropy(scores, target, reduction="none"))  # (size,)
    log_p = [-part.double().sum().item() for part in torch.cat(nats).cpu().split(lengths)]
    return list(zip(log_p, [part.all().item() for part in torch.cat(greedy).split(lengths)]))


def write(model, tokenizer, prompts, until, max_new_tokens, sampling):
    """Continue prompts (N, T) -> N texts, each cut where the first string of `until` begins.

    A text ends there, at end-of-text or after max_new_tokens. sampling: temperature, top_k, top_p.
    """
    texts, written, ended = ([value] * len(prompts) for value in ("", b"", False))
    stream = model.generate(torch.tensor(prompts), max_new_tokens, *sampling, stop=tokenizer.ends)
    for new in stream:
        for n, token in enumerate(torch.as_tensor(new).reshape(-1).tolist()):
            ended[n] = ended[n] or token in tokenizer.ends
            if ended[n]:
                continue
            written[n] += tokenizer.token_bytes(token) or b""
            text = written[n].decode("utf-8", "replace")
            starts = [text.find(string) for string in until if string in text]
            texts[n], ended[n] = text[: min(starts, default=None)], bool(starts)
        if all(ended):
            break
    return texts


def generation_settings(wanted):
    """A task's generation_kwargs -> (until, max_new_tokens, (temperature, top_k, top_p))."""
    if unknown := ", ".join(wanted.keys() - {*GENERATION}):
        raise ValueError(
            f"generation_kwargs {unknown}: only {', '.join(GENERATION)} are implemented; "
            "take them out of the task"
        )
    until, *limits, sample, temperature, top_k, top_p = map(wanted.get, GENERATION)
    until = [until] if isinstance(until, str) else until or []
    limit = next((n for n in limits if n is not None), 256)
    if sample is None:  # the harness's rule: a temperature asks for sampling
        sample = bool(temperature)
    temperature = 0.0 if not sample else 1.0 if temperature is None else float(temperature)
    return tuple(filter(None, until)), int(limit), (temperature, top_k or None, top_p)


class Adapter(LM):
    """A model of this project as the harness wants one: lm_eval.simple_evaluate(Adapter(…), …)."""

    def __init__(self, model, tokenizer, batch_size=8):
        super().__init__()
        self.model, self.words, self.batch_size = model, tokenizer, batch_size
        self.window = model.config.max_position_embeddings
        self.asked = 0  # requests
        self.notes = {SHORTENED: 0, APART: 0}  # what happened to how many of them

    def empty_context(self):
        """What a text without a context starts after: end-of-text, as in training."""
        if not self.words.ends:
            raise ValueError(
                "a request has no context and would start after an end-of-text token, but the "
                "tokenizer has none; name it in the checkpoint's config.json as eos_token_id"
            )
        return self.words.ends[:1]

    def encode_pair(self, context, continuation):
        """The harness's rule: blanks at the context's end belong to the continuation; both are
        encoded together and cut after as many tokens as the context has alone.

        Nothing is left where the continuation only makes the last token longer ("t" + "o" is one
        token). Such a continuation is encoded by itself.
        """
        end = len(context.rstrip())
        context, continuation = context[:end], context[end:] + continuation
        before = self.words.encode(context)
        after = self.words.encode(context + continuation)[len(before) :]
        if continuation and not after:
            self.notes[APART] += 1
            after = self.words.encode(continuation)
        return before or self.empty_context(), after

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [self.encode_pair(*request.args) for request in requests]
        self.notes[SHORTENED] += sum(len(a) + len(b) > self.window + 1 for a, b in pairs)
        return self.score_all(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """log P of whole texts, each of their tokens once."""
        pairs = [(self.empty_context(), self.words.encode(r.args[0])) for r in requests]
        return [log_p for log_p, _ in self.score_all(pairs)]

    def score_all(self, pairs):
        """`score`, in batches. A continuation longer than the window is scored in pieces, each
        after as many of the tokens before it as fit."""
        self.asked += len(pairs)
        pieces = []
        for n, (context, continuation) in enumerate(pairs):
            ids = [*context, *continuation]
            for i in range(len(context), len(ids), self.window):
                pieces.append((n, ids[max(0, i - self.window) : i], ids[i : i + self.window]))
        pieces.sort(key=lambda piece: -len(piece[1]) - len(piece[2]))  # rows of like length
        results = [(0.0, True)] * len(pairs)
        for batch in self.batches(pieces):
            for (n, *_), (log_p, greedy) in zip(batch, score(self.model, [p[1:] for p in batch])):
                results[n] = results[n][0] + log_p, results[n][1] and greedy
        return results

    def generate_until(self, requests, disable_tqdm=False):
        """Texts. A context keeps room for the text, but loses no more than the older half of the
        model's window; a text that outgrows the window goes on from its newest half."""
        groups, texts = {}, {}
        for n, request in enumerate(requests):
            how = generation_settings(request.args[1])
            prompt = self.words.encode(request.args[0]) or self.empty_context()
            room = max(1, self.window // 2, self.window - how[1])
            self.notes[SHORTENED] += len(prompt) > room
            prompt = prompt[-room:]
            groups.setdefault((how, len(prompt)), []).append((n, prompt))
        self.asked += len(requests)
        for (how, _), members in groups.items():
            for batch in self.batches(members):
                numbers, prompts = zip(*batch)
                texts |= zip(numbers, write(self.model, self.words, prompts, *how))
        return [texts[n] for n in range(len(requests))]

    def batches(self, items):
        for start in tqdm(range(0, len(items), self.batch_size), "batches", disable=None):
            yield items[start : start + self.batch_size]


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(message)


def parse(argv):
    """The command line. ValueError for a mistake that shows without the checkpoint."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    newest = max(Path("runs").glob("*/last"), key=os.path.getmtime, default=None)
    add = parser.add_argument
    add("--checkpoint", default=newest and newest.parent, help="folder, hub name or newest run")
    add("--revision", help="branch, tag or commit of a Hugging Face hub checkpoint")
    add("--tokenizer", help="folder, tokenizer.json or tiktoken name (default: the checkpoint's)")
    add("--tasks", nargs="+", default=PAPER, help="names (default: the paper's ten)")
    add("--include_path", help="folder with tasks of your own, YAML files")
    add("--calibration", type=float, help="τ; 1 is the paper's rule (default: as stored)")
    add("--limit", type=float, help="examples of each task; below 1: their share (default: all)")
    add("--num_fewshot", type=int, help="examples in the context (default: the task's)")
    add("--batch_size", type=int, default=8, help="requests at a time (default 8)")
    add("--seed", type=int, help="of all that is random (default: the harness's own)")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--output", help="write the results, and how they were made, to this JSON file")
    args = parser.parse_args(argv)
    args.command = shlex.join(["python", "tutorials/harness.py", *(argv or sys.argv[1:])])
    for name, least in (("num_fewshot", 0), ("batch_size", 1), ("seed", 0)):
        if (value := getattr(args, name)) is not None and not least <= value < 2**32:
            parser.error(f"--{name} must be from {least} to {2**32 - 1}, not {value}")
    for name in ("limit", "calibration"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            parser.error(f"--{name} must be a positive number, not {value:g}")
    if args.checkpoint is None:
        parser.error("there is no checkpoint under runs/ yet: run `python train.py` first")
    if args.include_path and not Path(args.include_path).is_dir():
        parser.error(f"--include_path: there is no folder {args.include_path}")
    if args.output and (Path(args.output).is_dir() or not Path(args.output).parent.is_dir()):
        parser.error(f"--output {args.output} must name a file, in a folder that exists")
    if LM is object:
        parser.error("the evaluation harness is not installed: pip install lm_eval")
    return args


def open_checkpoint(args):
    args.device = mhf.choose_device(args.device)
    args.checkpoint = mhf.find_checkpoint(args.checkpoint, args.revision)
    model = mhf.load(args.checkpoint).to(args.device).requires_grad_(False)
    tokenizer = tokenizers.load(args.tokenizer or args.checkpoint)
    tokenizers.check(model, tokenizer)
    model.config.calibration = args.calibration or model.config.calibration
    return model, tokenizer


def evaluate(lm, args):
    """The harness's dict of results. ValueError if tasks or data fail before the first request."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=args.include_path)
    for name in args.tasks:
        if not manager.match_tasks([name]):
            like = difflib.get_close_matches(name, manager.all_tasks) or ["none like it"]
            raise ValueError(
                f"unknown task {name}; the harness knows {', '.join(like)}; a task of your own "
                "needs --include_path with its folder"
            )
    tasks = manager.match_tasks(args.tasks)  # * and ? stand for other letters
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    how = {} if args.seed is None else dict.fromkeys(kinds, args.seed)
    how |= dict(num_fewshot=args.num_fewshot, limit=args.limit, batch_size=args.batch_size)
    try:
        return lm_eval.simple_evaluate(
            lm, tasks=tasks, task_manager=manager, log_samples=False, **how
        )
    except Exception as error:
        if lm.asked:
            raise
        remedy = "correct the task's file"
        if isinstance(error, OSError):
            remedy = "named tasks need a network for their data, your own the data_files they name"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"tasks {', '.join(tasks)}: {reason:.300}; {remedy}") from error


def run(args):
    """Print what was loaded, the harness's tables, and what happened to how many requests."""
    model, tokenizer = open_checkpoint(args)
    limit = f", limit {args.limit:g}" if args.limit else ""
    about = f"context {model.config.max_position_embeddings} tokens, device {args.device}{limit}"
    print(f"{args.checkpoint}: calibration τ {model.config.calibration:g}, {about}", flush=True)
    lm = Adapter(model, tokenizer, args.batch_size)
    results = evaluate(lm, args)
    for column in ("results", "groups"):
        if results.get(column):
            print(make_table(results, column))
    for note, count in lm.notes.items():
        if count:
            print(f"{count} of {lm.asked} requests: {note}")
    if args.output:
        results |= {"command": args.command, "checkpoint": str(args.checkpoint)}
        results |= {"model": asdict(model.config), "requests": {"all": lm.asked} | lm.notes}
        text = json.dumps(results, indent=2, default=str) + "\n"
        Path(args.output).write_text(text, encoding="utf-8")


def main(argv=None):
    """Returns the exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # τ, on whatever terminal or pipe
        if hasattr(stream, "reconfigure"):  # a notebook's has not
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        run(parse(argv))
    except (ValueError, OSError) as error:
        print("harness.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
