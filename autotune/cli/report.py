"""`autotune report`: the page of an answer, made again from its JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autotune.cli.exits import DONE
from autotune.cli.words import say
from autotune.errors import BadInput


@click.command(name="report", short_help="make the HTML page of an answer")
@click.argument("folder", default="autotune-out", metavar="[FOLDER]")
@click.option("--to", "target", metavar="FILE", help="Where to write the page; report.html in the folder otherwise.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document: where the page is.")
def command(folder: str, target: str | None, as_json: bool) -> int:
    """Make the page of an answer: one HTML file that opens in any browser, without a network. `autotune run` writes it by itself;
    this makes it again from recommendation.json, in FOLDER (autotune-out) or named itself.

    \b
    Example:
      autotune report autotune-out
    """
    from autotune.report import DOCUMENT, PAGE, read_document, render, write_page

    named = Path(folder)
    source = named / DOCUMENT if named.is_dir() else named
    document = read_document(source)
    page = Path(target) if target else source.parent / PAGE
    if page.is_dir():
        raise BadInput(f"--to {page} is a folder.", way_out=f"Name a file in it: --to {page / PAGE}.")
    write_page(page, render(document))
    if as_json:
        print(json.dumps({"schema": 1, "page": str(page)}))
    else:
        say(f"Written: {page}")
    return DONE
