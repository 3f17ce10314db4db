"""`python -m cp_engine doctor`: what is installed here, and which kernels training will use."""

from __future__ import annotations

import argparse
import json
from typing import Any

from cp_engine.doctor import examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 where training can run, 1 where something that it needs is broken."""
    report = examine()
    if args.json:
        print(json.dumps(report))
    else:
        _print(report)
    return 0 if report["ok"] else 1


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console()

    def say(text: str) -> None:
        console.print(escape(text), soft_wrap=True, highlight=False)

    say(f"python {report['python']}, CUDA of torch: {report['cuda'] or 'none'}")
    say("\n".join(f"  {name:<24} {found or 'not installed'}" for name, found in report["versions"].items()))
    if not report["gpus"]:
        say("no GPU: ranks run on the CPU and speak gloo")
    for gpu in report["gpus"]:
        say(f"GPU {gpu['index']}: {gpu['name']}, {gpu['memory_gib']} GiB, compute capability {gpu['capability']}")
    for link in report["links"]:
        one, other = link["between"]
        access = "read each other's memory" if link["peer_access"] else "cannot read each other's memory"
        say(f"GPUs {one} and {other}: {link['link'] or 'link not known'}, {access}")
    reads = report["peer_reads"]
    say(f"peer reads over symmetric memory: {'will be used' if reads is None else 'not used, ' + reads}")
    for line in operator_lines(report["operators"]):
        say(line)
    for command in report["install"]:
        say(f"for the faster kernels: {command}")
    for problem in report["problems"]:
        say(f"PROBLEM: {problem}")
    say("training can run" if report["ok"] else "training cannot run before these problems are solved")


def operator_lines(operators: list[dict[str, Any]]) -> list[str]:
    """Operators with their backends, and below them why not others; head sizes that agree share a line."""
    sizes: dict[tuple, list[str]] = {}
    for one in operators:
        why = tuple(f"{name} {reason}" for name, reason in one["why_not"].items())
        key = (one["operator"], one["dtype"], one["pack"], one["backend"], why)
        sizes.setdefault(key, []).append("" if one["head_size"] is None else str(one["head_size"]))
    lines = []
    for (operator, dtype, pack, backend, why), found in sizes.items():
        of_sizes = f", head size {' '.join(found)}" if any(found) else ""
        packs = "" if pack == "all" else f", {pack}"
        lines.append(f"{operator}, {dtype}{of_sizes}{packs}: {backend}")
        lines += [f"    not {reason}" for reason in why]
    return lines
