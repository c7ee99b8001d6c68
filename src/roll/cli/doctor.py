"""`roll doctor`: examine this machine."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["doctor"]


@click.command()
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="HOST:PORT",
    help="Also test the connection to this node; may be repeated.",
)
@click.option(
    "--listen", type=click.IntRange(1, 65535), metavar="PORT", help="Listen for --peer of other nodes instead."
)
@click.option("--for", "seconds", type=float, default=300.0, show_default=True, help="Duration of --listen in seconds.")
@click.option("--runs", metavar="DIR", default="runs", show_default=True, help="Directory for runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(peers: tuple[str, ...], listen: int | None, seconds: float, runs: str, as_json: bool) -> int:
    """Check whether this machine is ready for a run, and give advice.

    \b
    roll doctor                          check this machine
    roll doctor --listen 29500           listen on one node, then run on the others:
    roll doctor --peer node1:29500       check connection, bandwidth and versions

    Takes seconds and changes nothing. Only the specified peers are contacted. Exits with code 2 if there is a problem,
    with code 0 if there are only warnings.
    """
    from roll.preflight.doctor.network import answer_peers

    if listen is not None:
        answer_peers(listen, seconds=seconds, report_progress=click.echo)
        return 0
    from roll.preflight.doctor import examine, find_worst_verdict, render

    findings = list(examine(Path(runs), peers))
    click.echo(_format_json(findings) if as_json else render(findings))
    return 2 if find_worst_verdict(findings) == "problem" else 0


def _format_json(findings: list) -> str:
    import json
    from dataclasses import asdict

    from roll.preflight.doctor import find_worst_verdict

    return json.dumps(
        {"verdict": find_worst_verdict(findings), "findings": [asdict(each) for each in findings]}, indent=2
    )
