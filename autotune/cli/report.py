"""`autotune report`: the HTML page of an answer, generated from its JSON document."""

from __future__ import annotations

import json
from pathlib import Path

import click

from autotune.cli.exit_codes import DONE
from autotune.cli.options import as_json_option
from autotune.cli.output import say
from autotune.core.errors import BadInput
from autotune.core.files import write_output


@click.command(name="report", short_help="write the HTML page of an answer")
@click.argument("folder", default="autotune-out", metavar="[FOLDER]")
@click.option(
    "--to", "target", metavar="FILE", help="Output file. Default: report.html in the folder."
)
@as_json_option("Print one JSON document with the page's path.")
def command(
    folder: str,
    target: str | None,
    as_json: bool,
) -> int:
    """Write the page of an answer: one HTML file for any browser, without a network. `autotune run`
    writes it as well; this command generates it again from recommendation.json in FOLDER
    (autotune-out), or from a named file.

    \b
    Example:
      autotune report autotune-out

    """
    from autotune.report.html.render import PAGE, read_document, render
    from autotune.report.output_folder import DOCUMENT

    path = Path(folder)
    source = path / DOCUMENT if path.is_dir() else path
    document = read_document(source)
    page = Path(target) if target else source.parent / PAGE
    if page.is_dir():
        raise BadInput(
            f"--to {page} is a folder.", way_out=f"Name a file in it: --to {page / PAGE}."
        )
    write_output(page, render(document).encode(), way_out="Name another: --to ~/report.html.")
    if as_json:
        print(json.dumps({"schema": 1, "page": str(page)}))
    else:
        say(f"Written: {page}")
    return DONE
