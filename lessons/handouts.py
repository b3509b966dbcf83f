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
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)", re.DOTALL)
OUTPUT = re.compile(r"<!-- generated: output -->\n```text\n(.*?)```", re.DOTALL)
COMMENT_OF_LINE = re.compile(r"  # .*")
DOCSTRING = re.compile(r'^ *""".*?"""\n', re.DOTALL | re.MULTILINE)
# What fits on a slide of 16:9 in letters of 24 points, where the slide is 540 points high.
MAX_TEXT = 520  # letters of prose
MAX_ROWS = 11  # of code
CODE_WIDTH = 28  # letters of code beside a picture
WHOLE_WIDTH = 58
STYLE = """
:root { color-scheme: light dark }
:root { --page: #fff; --ink: #1b1f24; --soft: #f1f3f5; --accent: #00695c }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --ink: #e6e8eb; --soft: #232830; --accent: #4db6ac }
}
html { scroll-snap-type: y proximity }
body { margin: 0; background: var(--page); color: var(--ink);
  font: max(1.15rem, min(2.52vw, 4.48vh))/1.35 system-ui }
section { min-height: 100vh; box-sizing: border-box; padding: 2.4vh 4vw; scroll-snap-align: start }
h1, h2 { line-height: 1.2; margin: 0 0 .5em; font-size: 1.2em; color: var(--accent) }
p { margin: 0 0 .6em }
figure { margin: 0; overflow-x: auto }
figure:focus-visible, a:focus-visible { outline: 2px solid var(--accent) }
img { width: 100%; min-width: 600px; max-height: 76vh; display: block;
  object-fit: contain; object-position: left top }
nav ol { columns: 16em; margin: 0; font-size: .75em }
pre { background: var(--soft); padding: .5em; margin: 0 0 .6em; line-height: 1.25 }
pre, code { white-space: break-spaces; overflow-wrap: anywhere; font-size: 1em }
.line { display: block; min-height: 1.25em; text-indent: -2ch }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .2em .6em; text-align: left }
a { color: var(--accent) }
@media (min-width: 1000px) {
  .side-by-side { display: grid; grid-template-columns: 1fr 1fr; gap: 2vw }
  .side-by-side img { min-width: 0 }
}
@media print { section { break-after: page } }
"""


# -- slides ----------------------------------------------------------------------------------------


def make_slides(lessons):
    """Return one HTML page: each lesson's idea, picture, code, output, and what to look for."""
    slides = [make_contents(lessons)] if len(lessons) > 1 else []
    for lesson in lessons:
        text = read_page(lesson)
        title = f"{lesson['number']}. {lesson['title']}"
        intro = PICTURE.sub("", text.partition("## ")[0].partition("\n")[2])
        first, *others = split_text(intro, MAX_TEXT - len(lesson["idea"]))
        slides.append(make_slide(title, render(f"**{lesson['idea']}**\n\n{first}"), lesson))
        slides += [make_slide(title, render(part)) for part in others]
        pictures = [
            embed_picture(HERE / lesson["folder"] / path, alt)
            for alt, path in PICTURE.findall(text)
        ]
        slides += [make_slide(title, picture) for picture in pictures]
        slides.append(make_slide(title, show_code(lesson, "".join(pictures))))
        printed = f"{title}: what it prints"
        rows = MAX_ROWS + 1 - count_rows([lesson["command"]], WHOLE_WIDTH)
        first, *others = split_rows(find_output(text), rows)
        slides.append(make_slide(printed, render(f"    {lesson['command']}\n\n{first}")))
        slides += [make_slide(printed, render(part)) for part in others]
        look = split_text(find_section(text, "What to look for"), MAX_TEXT)
        slides += [make_slide(f"{title}: what to look for", render(part)) for part in look]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Lessons</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(slides)
        + "\n</body></html>\n"
    )


def show_code(lesson, picture):
    """Return the code that is new in a lesson, beside its picture, if it has one."""
    lines = find_code(lesson, CODE_WIDTH if picture else WHOLE_WIDTH)
    code = f"<pre><code>{''.join(map(render_line, lines))}</code></pre>"
    return f'<div class="side-by-side">{picture}{code}</div>' if picture else code


def find_code(lesson, width):
    """Return the lines of a lesson from the one that ladder.toml names, as many as fit."""
    text = (HERE / lesson["folder"] / "lesson.py").read_text()
    lines = COMMENT_OF_LINE.sub("", DOCSTRING.sub("", text)).splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    starts = [line.lstrip().startswith(lesson["code"]) for line in lines]
    first = starts.index(True)
    indent = len(lines[first]) - len(lines[first].lstrip())
    found = [lines[first][indent:]]
    for line in lines[first + 1 :]:
        is_below = line.startswith(" " * (indent + 1)) or (indent and line.startswith(" " * indent))
        if not is_below or count_rows([*found, line[indent:]], width) > MAX_ROWS:
            break
        found.append(line[indent:])
    return found


def render_line(line):
    """Return a line of code whose rest is indented further where it is wrapped."""
    text = line.lstrip(" ")
    indent = len(line) - len(text) + 2
    return f'<span class="line" style="padding-left: {indent}ch">{html.escape(text)}</span>'


def count_rows(lines, width):
    """Return how many rows lines take that are wrapped, and then indented further."""
    rows = 0
    for line in lines:
        letters = len(line.lstrip(" "))
        rows += max(1, -(-letters // (width - (len(line) - letters) - 2)))
    return rows


def split_rows(text, max_rows):
    """Split an output into blocks that fit on a slide, first where lines are left out."""
    is_long = count_rows(text.splitlines(), WHOLE_WIDTH) > max_rows
    blocks = [[]]
    for line in text.splitlines():
        if count_rows([*blocks[-1], line], WHOLE_WIDTH) > max_rows:
            blocks.append([])
        blocks[-1].append(line)
        if is_long and line == "...":
            blocks.append([])
    return ["\n".join(["```text", *block, "```\n"]) for block in blocks if block]


def split_text(text, max_letters):
    """Split Markdown between paragraphs and items of lists."""
    parts = [""]
    for paragraph in re.split(r"\n(?=\n|- )", COMMENT.sub("", text).strip()):
        if parts[-1] and len(parts[-1]) + len(paragraph) > max_letters:
            parts.append("")
        parts[-1] += f"{paragraph}\n"
    return parts


def make_contents(lessons):
    title = "<h1>From one all_reduce to a cluster</h1>"
    links = "".join(
        f'<li value="{lesson["number"]}"><a href="#lesson-{lesson["number"]}">'
        f"{html.escape(lesson['title'])}</a></li>"
        for lesson in lessons
    )
    return f"<section>{title}<nav><ol>{links}</ol></nav></section>"


def make_slide(title, body, lesson=None):
    """Return a slide; it is the first one of the lesson that is given."""
    mark = f' id="lesson-{lesson["number"]}"' if lesson else ""
    return f"<section{mark}><h2>{html.escape(title)}</h2>{body}</section>"


def render(text):
    """Return Markdown as HTML, without links that lead into the repository."""
    import markdown  # late: only slides need it

    return markdown.markdown(LINK.sub(r"\1", text), extensions=["fenced_code", "tables"])


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
    printed = find_output(text)
    look = find_section(text, "What to look for")
    cells = [
        make_cell("markdown", plain(PICTURE.sub(find_beside, text.partition("## ")[0]))),
        make_cell("markdown", "The lesson is one file. Processes cannot start from a cell's code."),
        make_cell("code", f"%%writefile lesson.py\n{code}"),
        make_cell("code", f"import sys\n!{{sys.executable}} lesson.py {shlex.join(args)}", printed),
        make_cell("markdown", f"## What to look for\n\n{plain(look)}"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4}
    return json.dumps({**notebook, "nbformat_minor": 5}, indent=1) + "\n"


def find_pictures(lesson):
    """Return the paths of a lesson's pictures that are installed."""
    paths = [HERE / lesson["folder"] / path for _, path in PICTURE.findall(read_page(lesson))]
    return [path for path in paths if path.is_file()]


def find_beside(picture):
    """Return a picture of a page as one in the folder of the notebook."""
    return f"![{picture[1]}]({Path(picture[2]).name})"


def make_cell(kind, text, printed=""):
    cell = {"cell_type": kind, "id": f"{kind}-{len(text)}", "metadata": {}, "source": text}
    shown = {"output_type": "stream", "name": "stdout", "text": printed}
    outputs = [shown] if printed else []
    return cell | ({"execution_count": None, "outputs": outputs} if kind == "code" else {})


# -- pages -----------------------------------------------------------------------------------------


def read_page(lesson):
    return (HERE / lesson["folder"] / "README.md").read_text()


def find_output(text):
    return OUTPUT.search(text)[1]


def find_section(text, title):
    """Return the text below a heading, up to the next one."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def plain(text):
    """Return Markdown without comments, and without links that lead into the repository."""
    return COMMENT.sub("", LINK.sub(r"\1", text)).strip()
