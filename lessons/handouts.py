"""Slides and notebooks, made of the lessons' own files by make.py."""

import base64
import html
import json
import re
import shlex
from pathlib import Path

HERE = Path(__file__).parent
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", re.DOTALL)
OUTPUT = re.compile(r"<!-- generated: output -->\n```text\n(.*?)```", re.DOTALL)
STYLE = """
:root { color-scheme: light dark }
:root { --page: #fff; --ink: #1b1f24; --soft: #f1f3f5; --accent: #00695c }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e6e8eb; --soft: #232830; --accent: #4db6ac }
}
html { scroll-snap-type: y proximity }
body { margin: 0; background: var(--page); color: var(--ink);
  font: clamp(1.15rem, min(1.8vw, 2.6vh), 2.2rem)/1.5 system-ui }
section { min-height: 100vh; box-sizing: border-box; padding: 5vh 7vw; scroll-snap-align: start }
h1, h2 { line-height: 1.2; color: var(--accent) }
figure { margin: 0; overflow-x: auto }
figure:focus-visible, a:focus-visible { outline: 2px solid var(--accent) }
img { width: 100%; min-width: 600px; max-height: 72vh; display: block;
  object-fit: contain; object-position: left }
nav ol { columns: 24rem }
pre { background: var(--soft); padding: .7em; font-size: .75em; line-height: 1.35 }
pre, code { white-space: break-spaces; overflow-wrap: anywhere }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2em .6em; text-align: left }
a { color: var(--accent) }
@media print { section { break-after: page } }
"""


# -- slides ----------------------------------------------------------------------------------------


def make_slides(lessons):
    """Return one HTML page: for each lesson its idea, picture, output, and what to look for."""
    slides = [make_contents(lessons)]
    for lesson in lessons:
        text = read_page(lesson)
        title = f"{lesson['number']}. {lesson['title']}"
        intro = text.partition("## ")[0].partition("\n")[2]
        slides.append(make_slide(lesson, title, lesson["idea"], PICTURE.sub("", intro)))
        for alt, path in PICTURE.findall(text):
            picture = embed_picture(HERE / lesson["folder"] / path, alt)
            if picture:
                slides.append(f"<section><h2>{html.escape(title)}</h2>{picture}</section>")
        output = OUTPUT.search(text)
        body = f"    {lesson['command']}\n\n```text\n{output[1]}```\n"
        slides.append(make_slide(lesson, f"{title}: what it prints", "", body))
        look = find_section(text, "What to look for")
        slides.append(make_slide(lesson, f"{title}: what to look for", "", look))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Lessons</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(slides)
        + "\n</body></html>\n"
    )


def make_contents(lessons):
    title = "<h1>From one all_reduce to a cluster</h1>"
    links = "".join(
        f'<li><a href="#lesson-{lesson["number"]}">{html.escape(lesson["title"])}</a></li>'
        for lesson in lessons
    )
    return f"<section>{title}<nav><ol>{links}</ol></nav></section>"


def make_slide(lesson, title, idea, body):
    import markdown  # late: only slides need it

    text = COMMENT.sub("", LINK.sub(r"\1", body))
    rendered = markdown.markdown(text, extensions=["fenced_code", "tables"])
    mark = f' id="lesson-{lesson["number"]}"' if idea else ""
    first = f"<p><strong>{html.escape(idea)}</strong></p>" if idea else ""
    return f"<section{mark}><h2>{html.escape(title)}</h2>{first}{rendered}</section>"


def embed_picture(path, alt):
    """Return the picture as a part of the page, or nothing where it is not installed."""
    if not path.is_file():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(" ".join(alt.split()), quote=True)
    image = f'<img alt="{text}" src="data:image/svg+xml;base64,{data}">'
    return f'<figure tabindex="0">{image}</figure>'


# -- notebooks -------------------------------------------------------------------------------------


def make_notebook(lesson):
    """Return a notebook that writes the lesson's file, runs it, and has the text of its page."""
    text = read_page(lesson)
    args = shlex.split(lesson["command"])[2:]  # without python and the file
    code = (HERE / lesson["folder"] / "lesson.py").read_text()
    intro = PICTURE.sub("", text.partition("## ")[0])
    look = find_section(text, "What to look for")
    cells = [
        make_cell("markdown", plain(intro)),
        make_cell("markdown", "The lesson is one file. Processes cannot start from a cell's code."),
        make_cell("code", f"%%writefile lesson.py\n{code}"),
        make_cell("code", f"import sys\n!{{sys.executable}} lesson.py {shlex.join(args)}"),
        make_cell("markdown", f"## What to look for\n\n{plain(look)}"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps({**notebook, "nbformat_minor": 5}, indent=1) + "\n"


def make_cell(kind, text):
    cell = {"cell_type": kind, "id": f"{kind}-{len(text)}", "metadata": {}, "source": text}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


# -- pages -----------------------------------------------------------------------------------------


def read_page(lesson):
    return (HERE / lesson["folder"] / "README.md").read_text()


def find_section(text, title):
    """Return the text below a heading, up to the next one."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def plain(text):
    """Return Markdown without comments, and without links that lead into the repository."""
    return COMMENT.sub("", LINK.sub(r"\1", text)).strip()
