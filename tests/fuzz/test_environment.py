"""Variables that launchers, batch systems and users set, with odd values and some of them missing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from odd import HOSTS, NUMBERS, PATHS, TEXTS

from fuzzing import Fuzz

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
]  # the other parts of the fuzz have a few cases in make test

WHOLE = ["0", "1", "2", *NUMBERS]
# Those of AT_START in warm.py cost a new interpreter each; they are few.
VARIABLES: dict[str, list[str]] = {
    **dict.fromkeys(
        (
            "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GROUP_RANK",
            "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS",
            "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_ID",
            "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_RESTART_COUNT", "SLURM_JOB_CPUS_PER_NODE",
            "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "STEPLADDER_END_TIME", "COLUMNS", "LINES", "NUM_NODES",
            "PRIMARY_PORT", "NODE_RANK", "NUM_TRAINERS", "PET_NNODES", "PET_NPROC_PER_NODE", "PET_MAX_RESTARTS",
            "PET_TIMEOUT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
        ),
        WHOLE,
    ),
    **dict.fromkeys(("MASTER_ADDR", "PRIMARY_ADDR", "NODE_ADDR"), HOSTS),
    **dict.fromkeys(("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), HOSTS),
    **dict.fromkeys(("SLURMD_NODENAME", "GLOO_SOCKET_IFNAME", "SLURM_CONF", "STEPLADDER_SECRET"), TEXTS),
    **dict.fromkeys(("STEPLADDER_END_FILE", "TMPDIR", "XDG_STATE_HOME", "HOME"), PATHS),
    **dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "TERM", "LANG", "LC_ALL", "TZ"), TEXTS),
}  # fmt: skip
COMMANDS = [
    ("train", "mlp", "--steps", "1", "--timeout", "5"), ("train", "mlp", "--nproc", "2", "--steps", "1"),
    ("run", "true"), ("run", "--nproc", "2", "true"), ("run", "--run-dir", "new", "true"), ("status",),
    ("doctor", "--nproc", "2"),
    ("profile", "mlp", "--steps", "1", "--warmup", "1"), ("lab", "status"),
    ("submit", "--dry-run", "--", "train", "mlp"),
]  # fmt: skip
# What a started rank has: with all of it a value is looked at that is never reached otherwise.
SETS: list[dict[str, str]] = [
    {},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
    {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
    {
        "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "1",
    },
    {"PRIMARY_ADDR": "127.0.0.1", "PRIMARY_PORT": "1", "NUM_NODES": "2", "NODE_ADDR": "127.0.0.1"},
]  # fmt: skip


def environments() -> st.SearchStrategy[dict[str, str]]:
    odd = st.sampled_from(sorted(VARIABLES)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(VARIABLES[name]))
    )
    return st.builds(
        lambda whole, changed: whole | dict(changed),
        st.sampled_from(SETS),
        st.lists(odd, min_size=1, max_size=3),
    )


def test_odd_variables_end_as_the_rule_says(fuzz: Fuzz) -> None:
    def attempt(case: tuple[dict[str, str], tuple[str, ...]]) -> str:
        env, words = case
        fuzz.sandbox.reset()
        return fuzz.sandbox.call(words, env, works=words[0] != "status").validate_end(
            foreign=words[0] == "run"
        )

    fuzz.each(st.tuples(environments(), st.sampled_from(COMMANDS)), attempt)
