"""What the operator's commands print: tables, a progress bar, and strangers' text that no terminal obeys."""

import sys

import click


def plain(value):
    """Write one value on one line; control characters, which a terminal would obey, become visible marks."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = "-" if value is None else str(value)
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def table(headings, rows):
    """Print rows under their headings, columns as wide as their longest cell."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells)]
    for number, row in enumerate([headings, *cells]):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)


def progress(label):
    """Return a callback (total, done) that draws a bar on a terminal and is silent elsewhere."""
    if not sys.stderr.isatty():
        return lambda total, done: None

    def draw(total, done):
        filled = 30 * (done + 1) // max(total, 1)
        end = "\n" if done + 1 >= total else ""
        click.echo(f"\r{label} [{'#' * filled:30}] {done + 1}/{total}{end}", err=True, nl=False)

    return draw
