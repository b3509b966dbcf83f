"""What make.py draws, from the files that the lessons leave in their folders."""

import json

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {
    "forward": "#4c78a8",
    "backward": "#72b7b2",
    "wait": "#bab0ac",
    "all_reduce": "#e45756",
    "optimizer": "#b279a2",
}
RANKS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2"]
# Letters stay letters, ids and dates stay the same: a picture changes only where its numbers do.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "stepladder", "font.size": 9})


def save(figure, path):
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def timeline(folder, path, steps=3):
    """Lesson 5: what each rank does in the last steps of the profile."""
    ranks = sorted(folder.glob("rank*.pt.trace.json"))
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.6 * len(ranks)))
    tracks = []
    for trace in ranks:
        events = json.loads(trace.read_text())["traceEvents"]
        phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in COLOURS]
        tracks.append(sorted(phases, key=lambda event: event["ts"])[-len(COLOURS) * steps :])
    start = min(track[0]["ts"] for track in tracks)
    for rank, track in enumerate(tracks):
        for event in track:
            left, width = (event["ts"] - start) / 1000, event["dur"] / 1000
            axes.barh(rank, width, left=left, color=COLOURS[event["name"]])
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(
        handles,
        COLOURS,
        ncols=len(COLOURS),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        frameon=False,
    )
    save(figure, path)


def hands(folder, path, shown=12):
    """Lesson 7: the ends of the order of three epochs, coloured by the rank that is dealt each
    sample.
    """
    epochs = json.loads((folder / "hands.json").read_text())[:3]
    figure, axes = plt.subplots(figsize=(8, 2.2))
    for row, ranks in enumerate(epochs):
        order = [sample for turn in zip(*ranks, strict=True) for sample in turn]
        where = [(place, place) for place in range(shown)]
        where += [
            (shown + 1 + place, len(order) - shown // 2 + place) for place in range(shown // 2)
        ]
        for column, place in where:
            colour = RANKS[place % len(ranks)]
            again = order[place] in order[:place]
            axes.add_patch(plt.Rectangle((column, row), 0.94, 0.8, facecolor=colour, alpha=0.85))
            if again:
                axes.add_patch(
                    plt.Rectangle((column, row), 0.94, 0.8, fill=False, edgecolor="black", lw=2)
                )
            axes.text(
                column + 0.47,
                row + 0.4,
                order[place],
                ha="center",
                va="center",
                color="white",
                fontsize=7,
            )
        axes.text(shown + 0.45, row + 0.4, "...", ha="center", va="center")
    axes.set(xlim=(-0.2, shown * 1.5 + 1.2), ylim=(len(epochs), -0.2), xticks=[])
    axes.set_yticks(
        [row + 0.4 for row in range(len(epochs))], [f"epoch {row}" for row in range(len(epochs))]
    )
    axes.spines[:].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=RANKS[rank]) for rank in range(len(epochs[0]))]
    names = [f"rank {rank}" for rank in range(len(epochs[0]))]
    axes.legend(handles, names, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    save(figure, path)


def curves(folder, path):
    """Lesson 9: the loss after each epoch, four ways."""
    figure, axes = plt.subplots(figsize=(6.5, 3.2))
    styles = [("-", "o"), ("--", "s"), ("-.", "^"), (":", "x")]
    for (name, losses), (line, marker) in zip(
        json.loads((folder / "curves.json").read_text()).items(), styles, strict=True
    ):
        axes.plot(range(1, len(losses) + 1), losses, line, marker=marker, label=name)
    axes.axhline(0.01, color="grey", lw=0.8)
    axes.text(1, 0.0103, "noise", color="grey", va="bottom")
    axes.set(yscale="log", xlabel="epoch", ylabel="loss on all samples")
    axes.legend(frameon=False)
    save(figure, path)


PICTURES = {
    "05-profile": ("timeline.svg", timeline),
    "07-who-sees-what": ("hands.svg", hands),
    "09-learning-rate": ("curves.svg", curves),
}
FLAGS = {
    "05-profile": ["--nproc", "2"],
    "07-who-sees-what": ["--nproc", "3"],
    "09-learning-rate": ["--nproc", "4"],
}
