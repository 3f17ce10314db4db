"""The command line: `train`, `logprobs`, `verify`, `plan` and `doctor`.

Only the chosen command's modules are imported, so `plan` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

_COMMANDS = {
    "train": "Train a model on a rollout file.",
    "logprobs": "Add a model's log-probs to a rollout file.",
    "verify": "Compare the tree engine with every rollout run alone through the unmodified model.",
    "plan": "Show what sharing saves and which rank would own what.",
    "doctor": "Show what is installed, which kernels will run here and why, and what to install.",
}

_ALONE = ("plan", "doctor")  # they start no ranks


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code: 0 done, 1 not ok, 2 wrong input, 3 failed, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    about = "Exact training of language models on packed prefix trees, over context-parallel ranks."
    parser = argparse.ArgumentParser(prog="python -m cp_engine", description=about)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((a for a in argv if a in _COMMANDS), None)
    for name, text in _COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == chosen:
            importlib.import_module(f"cp_engine.cli.{name}").add_arguments(sub)
    args, rest = parser.parse_known_args(argv)
    # argparse gives up on positionals that follow an option, as in `train c.yaml --cp 2 steps=3`.
    if rest and args.command == "train" and all("=" in r and not r.startswith("-") for r in rest):
        args.overrides += rest
    elif rest:
        form = "; settings have the form key.sub=value, such as optimizer.lr=3e-4" if args.command == "train" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{form}")
    command = importlib.import_module(f"cp_engine.cli.{args.command}")
    if args.command in _ALONE:
        sys.exit(guarded(command.run, args))
    try:
        world = command.local_ranks(args)
    except ValueError as error:
        sys.exit(_complain(error))
    if world > 1 and "RANK" not in os.environ:
        from cp_engine.distributed.launch import run_local_ranks

        sys.exit(guarded(lambda _: run_local_ranks(world, argv), args))
    from cp_engine.distributed.ranks import shutdown

    shutdown(guarded(command.run, args))


def guarded(run, args) -> int:
    """The exit code of ``run(args)``; wrong input is one line on stderr, not a traceback."""
    try:
        return run(args)
    except ValueError as error:
        return _complain(error)
    except KeyboardInterrupt:  # an ordinary exit would wait for threads that wait for ranks that are gone
        sys.stderr.write("interrupted\n")
        return 130
    except Exception:
        import traceback

        traceback.print_exc()
        return 3


def _complain(error: ValueError) -> int:
    sys.stderr.write(f"error: {error}\n")  # in one piece, since other ranks write too
    return 2
