"""python benchmarks/lessons.py [--rounds N] [--write]

How long does each lesson take, and does its claim hold? Each is checked as `stepladder learn check`
does it, all in turn, N times over; the one on Slurm where a lab is up (`stepladder lab up --nodes
2`), the ones on MNIST and MovieLens with the data that they find."""

import argparse
import time
from statistics import median

from report import Report, table

from stepladder.tools.learn.check import check_lesson, find_missing_requirement
from stepladder.tools.learn.course import load_course

SECONDS_AT_MOST = 20.0


def verdict(claim: str, but_not: list[str]) -> str:
    return f"- {'FAIL' if but_not else 'PASS'}: {claim}{', but not ' + ', '.join(but_not) if but_not else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report("lessons.py", "The lessons: what they take", ["torch", "stepladder"], "all")
    course = load_course()
    lessons = [lesson for lesson in course.lessons if find_missing_requirement(lesson) is None]
    seconds: dict[str, list[float]] = {lesson.folder: [] for lesson in lessons}
    failed: list[str] = []
    outputs: dict[str, str] = {}
    for _ in range(args.rounds):
        for lesson in lessons:
            began = time.perf_counter()
            checked = check_lesson(course, lesson, lambda _: None)
            seconds[lesson.folder].append(time.perf_counter() - began)
            outputs[lesson.folder] = checked.text
            failed += [lesson.folder] * (not checked.passed)
    rows = [
        [folder, f"{median(taken):.1f}", f"{min(taken):.1f} to {max(taken):.1f}", outputs[folder]]
        for folder, taken in seconds.items()
    ]
    verdicts = [
        verdict(f"every claim holds, in {args.rounds} rounds", failed),
        verdict(
            f"at most {SECONDS_AT_MOST:g} s each",
            [f for f, taken in seconds.items() if median(taken) > SECONDS_AT_MOST],
        ),
    ]
    if left_out := [lesson.folder for lesson in course.lessons if lesson not in lessons]:
        verdicts.append(f"- not run, for want of Slurm: {', '.join(left_out)}")
    report.finish(
        [table(["lesson", "median s", "range", "it says"], rows), "\n".join(verdicts)], args.write
    )


if __name__ == "__main__":
    main()
