"""The pictures of make.py, drawn from the files that lessons write into their folders."""

import json

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PHASE_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "wait": "#bab0ac",
    "all_reduce": "#e45756",
    "optimizer": "#b279a2",
}
RANK_COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2"]
# Texts stay texts, and ids and dates stay the same: a picture changes only with its numbers.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "stepladder", "font.size": 9})


def save(figure, path):
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def add_legend(axes, colours):
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(
        handles,
        colours,
        ncols=len(colours),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        frameon=False,
    )


def draw_timeline(folder, path, steps=3):
    """Draw what each rank does in the last steps of the profile of lesson 5."""
    traces = sorted(folder.glob("rank*.pt.trace.json"))
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.6 * len(traces)))
    tracks = [read_phases(trace)[-len(PHASE_COLOURS) * steps :] for trace in traces]
    first_ts = min(track[0]["ts"] for track in tracks)
    for rank, track in enumerate(tracks):
        for event in track:
            start = (event["ts"] - first_ts) / 1000
            duration = event["dur"] / 1000
            axes.barh(rank, duration, left=start, color=PHASE_COLOURS[event["name"]])
    axes.set_yticks(range(len(tracks)), [f"rank {rank}" for rank in range(len(tracks))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    add_legend(axes, PHASE_COLOURS)
    save(figure, path)


def read_phases(trace):
    """Return the events of a Chrome trace that are phases of a step, in order of time."""
    events = json.loads(trace.read_text())["traceEvents"]
    annotations = [event for event in events if event.get("cat") == "user_annotation"]
    phases = [event for event in annotations if event["name"] in PHASE_COLOURS]
    return sorted(phases, key=lambda event: event["ts"])


def draw_hands(folder, path, shown=12):
    """Draw which rank gets which sample at both ends of three epochs, for lesson 7."""
    epochs = json.loads((folder / "hands.json").read_text())[:3]
    figure, axes = plt.subplots(figsize=(8, 2.2))
    for row, ranks in enumerate(epochs):
        order = [sample for turn in zip(*ranks, strict=True) for sample in turn]
        for column in range(shown):
            draw_sample(axes, column, row, order, column, len(ranks))
        last = len(order) - shown // 2
        for column in range(shown // 2):
            draw_sample(axes, shown + 1 + column, row, order, last + column, len(ranks))
        axes.text(shown + 0.45, row + 0.4, "...", ha="center", va="center")
    axes.set(xlim=(-0.2, shown * 1.5 + 1.2), ylim=(len(epochs), -0.2), xticks=[])
    rows = range(len(epochs))
    axes.set_yticks([row + 0.4 for row in rows], [f"epoch {row}" for row in rows])
    axes.spines[:].set_visible(False)
    num_ranks = len(epochs[0])
    add_legend(axes, {f"rank {rank}": RANK_COLOURS[rank] for rank in range(num_ranks)})
    save(figure, path)


def draw_sample(axes, column, row, order, index, num_ranks):
    """Draw order[index] in the colour of its rank, with a border if the epoch has it before."""
    colour = RANK_COLOURS[index % num_ranks]
    axes.add_patch(plt.Rectangle((column, row), 0.94, 0.8, facecolor=colour, alpha=0.85))
    is_repeated = order[index] in order[:index]
    if is_repeated:
        border = plt.Rectangle((column, row), 0.94, 0.8, fill=False, edgecolor="black", lw=2)
        axes.add_patch(border)
    style = {"ha": "center", "va": "center", "fontsize": 7}
    axes.text(column + 0.47, row + 0.4, order[index], **style)


def draw_curves(folder, path):
    """Draw the loss after each epoch for the four trainings of lesson 9."""
    figure, axes = plt.subplots(figsize=(6.5, 3.2))
    styles = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "x")]
    curves = json.loads((folder / "curves.json").read_text())
    for (name, losses), (line, marker) in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(losses) + 1), losses, line, marker=marker, label=name)
    axes.axhline(0.01, color="grey", lw=0.8)
    axes.text(1, 0.0103, "noise", color="grey", va="bottom")
    axes.set(yscale="log", xlabel="epoch", ylabel="loss on all samples")
    axes.legend(frameon=False)
    save(figure, path)


PICTURES = {
    "05-profile": ("timeline.svg", draw_timeline),
    "07-who-sees-what": ("hands.svg", draw_hands),
    "09-learning-rate": ("curves.svg", draw_curves),
}
FLAGS = {
    "05-profile": ["--nproc", "2"],
    "07-who-sees-what": ["--nproc", "3"],
    "09-learning-rate": ["--nproc", "4"],
}
