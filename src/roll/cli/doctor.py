"""`roll doctor`: examine this machine."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["doctor"]


@click.command()
@click.option("--peer", "peers", multiple=True, metavar="HOST:PORT", help="Also reach this node; may be repeated.")
@click.option("--listen", type=click.IntRange(1, 65535), metavar="PORT", help="Answer other nodes' --peer instead.")
@click.option("--for", "seconds", type=float, default=300.0, show_default=True, help="Seconds to --listen.")
@click.option("--runs", metavar="DIR", default="runs", show_default=True, help="Where runs will be written.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(peers: tuple[str, ...], listen: int | None, seconds: float, runs: str, as_json: bool) -> int:
    """Examine this machine: what is fit for a run, what is not, and what to do.

    \b
    roll doctor                          this machine
    roll doctor --listen 29500           on one node, and then …
    roll doctor --peer node1:29500       … on the others: is it reached, how fast, are versions the same?

    Takes seconds, changes nothing, and asks the network only for the peers that you name. Exits with code 2 if there
    is a problem; warnings leave it at 0.
    """
    from roll.preflight.doctor.network import answer_peers

    if listen is not None:
        answer_peers(listen, seconds=seconds, say=click.echo)
        return 0
    from roll.preflight.doctor import examine, render, worst

    findings = list(examine(Path(runs), peers))
    click.echo(_json(findings) if as_json else render(findings))
    return 2 if worst(findings) == "problem" else 0


def _json(findings: list) -> str:
    import json
    from dataclasses import asdict

    from roll.preflight.doctor import worst

    return json.dumps({"verdict": worst(findings), "findings": [asdict(each) for each in findings]}, indent=2)
