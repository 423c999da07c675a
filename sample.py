"""Sample from a trained model: stream its text, or --explain how it came to every token."""

import argparse
import codecs
import math
import os
import sys
import time
from pathlib import Path


def parse(argv):
    parser = argparse.ArgumentParser("sample.py", argparse.SUPPRESS, __doc__, allow_abbrev=False)
    add, cores = parser.add_argument, range(1, 1 + (os.cpu_count() or 1))
    shipped = Path(__file__).parent / "tutorials" / "checkpoint" / "last"
    newest = max(Path("runs").glob("*/last"), key=os.path.getmtime, default=shipped).parent
    add("--checkpoint", default=newest, help="run, folder or hub name (default: newest run)")
    add("--revision", help="branch, tag or commit of a Hugging Face hub checkpoint")
    add("--tokenizer", help="file, folder, hub or tiktoken name (default: the checkpoint's)")
    add("--prompt", default="\n", help="text to continue (default: a newline); - reads stdin")
    add("--num_samples", type=int, default=1, help="sample i uses seed + i (default: 1)")
    add("--max_new_tokens", type=int, default=200, help="tokens in a sample (default: 200)")
    add("--seed", type=int, default=0, help="same seed, same machine, same text (default: 0)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    add("--top_k", type=int, help="sample among the k most probable tokens (default: all)")
    add("--top_p", type=float, help="sample among the fewest tokens of mass p (default: all)")
    add("--stop_at_eot", action=argparse.BooleanOptionalAction, default=True, help="the default")
    add("--explain", action="store_true", help="print how each token was predicted, not the text")
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--threads", type=int, choices=cores, metavar="N", help=f"CPU threads, 1 to {cores[-1]}")
    args = parser.parse_args(argv)
    for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("seed", 0)):
        if not least <= getattr(args, name) < 2**62:
            parser.error(f"--{name} must be from {least} to 2^62, not {getattr(args, name)}")
    if args.revision and Path(args.checkpoint).exists():
        parser.error(f"--revision {args.revision} goes with a hub name, not with a folder")
    return args


def table(found, model, token, log_p, shown):
    """What `explain` found about the prediction of a token, in lines of at most 100 columns."""
    mass = f"  valid mass {found['valid_mass']:.3g}" if "valid_mass" in found else ""
    lines = [f"{shown[token]:<20.20}  id {token:<8}  P {math.exp(log_p):.4f}{mass}"]
    for j, function in enumerate(found.get("functions", ())):
        own, top = model.signatures.signatures[token][j], function["top"]
        cells = [f"{b['bucket']:>9}{'* '[b['bucket'] != own]}{b['prob']:.4f}" for b in top]
        lines.append(f"  function {j:<2} id {own:<8}" + "".join(cells))
    best = [f"  {shown[t['id']]:<11.9} {math.exp(t['log_prob']):.4f}" for t in found["top_tokens"]]
    return "\n".join([*lines, "  most probable" + "".join(best[:3]), ""])


def run(args):  # prints the samples; on standard error, what was loaded and how fast it went
    import mhf  # here, with all of torch, so that --help answers at once
    from support import explain, tokenizer

    mhf.torch.set_num_threads(args.threads or mhf.torch.get_num_threads())
    folder = mhf.find_checkpoint(args.checkpoint, args.revision)
    model, words = mhf.load(folder).to(mhf.choose_device(args.device)), None
    if args.tokenizer or any(folder.glob("tokenizer.*")):
        words = tokenizer.load(args.tokenizer or folder)
        tokenizer.check(model, words)
    config, window = model.config, model.config.max_position_embeddings
    text = sys.stdin.buffer.read() if args.prompt == "-" else os.fsencode(args.prompt)
    ends = words.ends if words else tokenizer.end_ids(config.extra)
    try:
        text = text.decode("utf-8-sig")
        ids = words.encode(text) if words else [int(word) for word in text.split()] or ends[:1]
    except ValueError as error:
        raise ValueError(f"--prompt takes UTF-8, or ids without a tokenizer: {error}") from None
    size = f"{model.num_parameters()['total']:,} parameters, calibration τ {config.calibration:g}"
    size += "" if words else "; no tokenizer (--tokenizer), so prompt and text are token ids"
    print(f"{folder} on {model.device}: prompt {len(ids)}/{window} tokens, {size}", file=sys.stderr)
    known = model.signatures.tokens if config.model == "mhf" else [None] * config.vocab_size
    spell = words.token_bytes if words else lambda i: b" %d" % i
    names = [spell(i) or token or b"<%d>" % i for i, token in enumerate(known)]
    shown = [repr(name.decode("utf-8", errors="surrogateescape")) for name in names]
    stop, start, count = ends if args.stop_at_eot else [], time.perf_counter(), 0
    settings = args.max_new_tokens, args.temperature, args.top_k, args.top_p, stop
    for i in range(args.num_samples):
        decoder, context = codecs.getincrementaldecoder("utf-8")("replace"), ids
        opening = "-" * 40 + "\n" if i else ""  # it waits for a token: mistakes come before it
        opening += "P: before temperature and cuts; *: own bucket\n" if args.explain else text
        for token, log_p in model.generate(ids, *settings, args.seed + i, return_log_probs=True):
            context = context if len(context) <= window else context[-max(1, window // 2) :]
            piece = decoder.decode(b"" if args.explain or token in stop else names[token])
            if args.explain:
                piece = table(explain.explain(model, context, top_k=4), model, token, log_p, shown)
            print(opening + piece, end="", flush=True)
            opening, context, count = "", [*context, token], count + 1
        print(decoder.decode(b"", final=True), flush=True)
    print(f"{count} tokens, {count / (time.perf_counter() - start):.1f} tok/s", file=sys.stderr)


def main(argv=None):  # -> exit status: 0, 2 for a mistake in the call, 130 for Ctrl-C
    try:
        run(parse(argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print("sample.py: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for stream in filter(None, (sys.stdout, sys.stderr)):  # UTF-8, whatever the terminal says
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    sys.exit(main())
