"""Files that the script saves and loads."""

from __future__ import annotations

from pathlib import PurePath

from stepladder.tools.check.recording import Event, RankLog
from stepladder.tools.check.rules.base import Faults, Seen
from stepladder.tools.check.tree import full_name


def final_paths(log: RankLog) -> dict[str, str]:
    """Where a saved file ends up: it may be written under another name, and renamed."""
    return {event["source"]: event["target"] for event in log.of("moved")}


def many_writers(seen: Seen) -> Faults:
    writers: dict[str, dict[int, Event]] = {}
    for log in seen.run.ranks:
        moved = final_paths(log)
        for event in log.of("save"):
            writers.setdefault(str(moved.get(event["path"], event["path"])), {})[log.rank] = event
    for path, by_rank in writers.items():
        if path and len(by_rank) > 1 and not path.startswith("/dev/"):
            ranks = " and ".join(str(rank) for rank in sorted(by_rank)[:4])
            event = by_rank[min(by_rank)]
            nodes = (
                ""
                if seen.run.single or not reads_local(seen)
                else "; each of them plays local rank 0 of a node of its own"
            )
            yield seen.fault(
                "many-writers", event["at"], f"ranks {ranks} write {PurePath(path).name}{nodes}"
            )
            return


def resumed_in_run(seen: Seen) -> Faults:
    """A script that goes on from its own snapshot in the same process: which batch comes first
    after it.
    """
    log = seen.run.ranks[0]
    saves, moved = log.of("save"), final_paths(log)
    for load in log.of("load"):
        own = [
            e
            for e in saves
            if e["n"] < load["n"] and moved.get(e["path"], e["path"]) == load["path"]
        ]
        starts = [max((e["n"] for e in saves if e["n"] < one["n"]), default=0) for one in own]
        epochs = [first_rows(log, start, one["n"]) for start, one in zip(starts, own, strict=True)]
        resumed = first_rows(
            log, load["n"], min((e["n"] for e in saves if e["n"] > load["n"]), default=1 << 60)
        )
        different = len({str(rows) for rows in epochs}) == len(epochs) > 1 and all(epochs)
        if different and resumed == epochs[-1]:
            yield seen.fault(
                "resume-epoch",
                own[-1]["at"],
                f"{PurePath(load['path']).name} was written {len(own)} times, and is loaded again in the same "
                f"run; what is trained then begins with the batch that the last of these epochs began with",
            )
            return


def first_rows(log: RankLog, after: int, before: int) -> list[str]:
    """Of the first batch that is trained between two places of the recording."""
    calls = (e for e in log.of("forward") if e["grad"] and after < e["n"] < before)
    return list(next(calls, {}).get("rows", []))


def reads_local(seen: Seen) -> bool:
    return seen.source.has("LOCAL_RANK", "local_rank", "node_rank")


def in_place(seen: Seen) -> Faults:
    for log in [*seen.run.ranks, *seen.run.others]:
        moved = final_paths(log)
        times: dict[str, list[Event]] = {}
        for event in log.of("save"):
            if event["path"] and event["path"] not in moved and not event.get("opened"):
                times.setdefault(event["path"], []).append(event)
        for path, events in times.items():
            name = PurePath(path).name
            over = [event for event in events if event["existed"]]
            if name.endswith((".tmp", ".part", ".partial", ".new")) or path.startswith("/dev/"):
                continue
            if over:
                yield seen.fault(
                    "in-place-snapshot",
                    events[0]["at"],
                    f"{name} is written {len(events)} times, {len(over)} times over the only copy",
                    log.rank,
                )
                return
            if (
                path in looked_before(log, events[0])
                and trained_after(log, events[0])
                and is_snapshot(events[0])
            ):
                yield seen.fault(
                    "in-place-snapshot",
                    events[0]["at"],
                    f"{name}, which the script goes on from when it is there, is written in place",
                    log.rank,
                )
                return


def looked_before(log: RankLog, event: Event) -> set[str]:
    """Paths that the script has looked for before this: what it would go on from."""
    return {e["path"] for e in log.of("looked", "load") if e["n"] < event["n"]}


def trained_after(log: RankLog, event: Event) -> bool:
    return any(e["n"] > event["n"] for e in log.of("backward", "enough"))


def is_snapshot(event: Event) -> bool:
    return bool(event["model"]) and not event["bare"]


def incomplete(seen: Seen) -> Faults:
    for log in seen.run.ranks:
        moved = final_paths(log)
        groups = grouped(log)
        for events in groups:
            models = [event for event in events if event["model"]]
            if not models or not log.of("step"):
                continue
            has = {
                part: any(e[part] for e in events)
                for part in ("optimizer", "schedule", "random", "position")
            }
            path = models[0]["path"]
            resumes = bool({path, moved.get(path, path)} & looked_before(log, models[0]))
            if not (has["optimizer"] or has["schedule"] or has["position"] or resumes):
                continue
            missing = missing_in(log, has)
            if missing and not best_only(seen, models[0]):
                yield seen.fault(
                    "incomplete-snapshot",
                    models[0]["at"],
                    f"{PurePath(path).name} holds {listed(models[0], has)}; missing: {', '.join(missing)}",
                    log.rank,
                    "" if missing != ["random state"] else "note",
                )
                return


def best_only(seen: Seen, event: Event) -> bool:
    """A copy of the best weights, beside a snapshot."""
    return "best" in PurePath(event["path"]).name.lower()


def grouped(log: RankLog) -> list[list[Event]]:
    """Saves with no training between them make one snapshot."""
    found: list[list[Event]] = []
    fresh = True
    for event in log.of("save", "backward", "step"):
        if event["k"] != "save":
            fresh = True
        elif fresh:
            found.append([event])
            fresh = False
        else:
            found[-1].append(event)
    return found


def listed(event: Event, has: dict[str, bool]) -> str:
    if event["bare"]:
        return "weights"
    keys = ", ".join(event["keys"][:8])
    return keys or ", ".join(["model", *(part for part, there in has.items() if there)])


def missing_in(log: RankLog, has: dict[str, bool]) -> list[str]:
    missing = []
    if not has["optimizer"]:
        state = any(any(e["state"].values()) for e in log.of("step") if "state" in e)
        missing.append("the optimizer" + (" (it has state: momentum or moments)" if state else ""))
    if not has["schedule"] and log.of("sched"):
        missing.append("the schedule")
    if not has["position"]:
        missing.append("the position (epoch or step)")
    if not has["random"] and any(e.get("drops") for e in log.of("forward")):
        missing.append("random state")
    return missing


def module_prefix(seen: Seen) -> Faults:
    others = [(-1, event) for log in seen.run.others for event in log.of("loadsd")]
    for rank, event in [*seen.run.of("loadsd"), *others]:
        if event["more"] or event["fewer"]:
            more = (
                "the file's keys begin with module. and the model's do not"
                if event["more"]
                else "the model's keys begin with module. and the file's do not"
            )
            hidden = ", and strict=False hides it" if event["strict"] in (False, "False") else ""
            yield seen.fault(
                "module-prefix",
                event["at"],
                f"0 of {event['own']} tensors are found in the file: {more}{hidden}",
                rank,
            )
            return


def unsafe_load(seen: Seen) -> Faults:
    pickled = [event for _, event in seen.run.of("save") if event.get("opened")]
    for file, call in seen.source.calls("load") if pickled else []:
        if full_name(call.func) in ("pickle.load", "dill.load", "joblib.load", "cPickle.load"):
            said = (
                f"{full_name(call.func)} of what {PurePath(pickled[0]['path']).name} holds: weights"
            )
            yield seen.fault("unsafe-load", [file.name, call.lineno, ""], said)
            return
    for rank, event in seen.run.of("load"):
        if event["weights_only"] == "False" and event["at"]:
            yield seen.fault(
                "unsafe-load",
                event["at"],
                f"{PurePath(event['path']).name} is loaded with weights_only=False",
                rank,
            )
