"""Mistakes in batch scripts: each is found on its line, and what is right is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepladder.tools.lint.lint import lint_script

GOOD = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --signal=TERM@120
#SBATCH --requeue

export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 2 train.py
"""
TORCHRUN = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun'


def findings(tmp_path: Path, text: str) -> list[tuple[str, int]]:
    (tmp_path / "train.py").touch()
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    return [(finding.rule, finding.location.line) for finding in lint_script(script)]


@pytest.mark.parametrize(
    ("right", "wrong", "rule", "line"),
    [
        ("#SBATCH --nodes=2", "# SBATCH --nodes=2", "comment", 2),
        ("#SBATCH --requeue\n", "echo\n#SBATCH --requeue\n", "too late", 7),
        (" train.py", " --node-rank=$SLURM_PROCID train.py", "expanded early", 9),
        (" train.py", ' --node_rank "${SLURM_NODEID}" train.py', "expanded early", 9),
        ("$((20000 + SLURM_JOB_ID % 12000))", "29500", "fixed port", 8),
        (" train.py", ' \\\n  --rdzv-endpoint "$HOST":29500 train.py', "fixed port", 10),
        ('--nnodes "$SLURM_JOB_NUM_NODES"', "--nnodes=2", "two counts", 9),
        ("srun ", "srun -N 2 ", "two counts", 9),
        (" train.py", " && accelerate launch --num_machines 2 train.py", "two counts", 9),
        (" train.py", " && accelerate launch --main_process_port 29501 train.py", "fixed port", 9),
        ("#SBATCH --signal=TERM@120\n", "", "no signal", 1),
        ("#SBATCH --requeue\n", "", "no requeue", 1),
        ("--ntasks-per-node=1", "--ntasks-per-node=2", "tasks and agents", 9),
        ("#SBATCH --ntasks-per-node=1", "#SBATCH -n 8", "tasks and agents", 9),
        (TORCHRUN, "torchrun", "no srun", 9),
        ("#SBATCH --requeue", "#SBATCH --requeue --gpus-per-task=1", "hidden GPUs", 6),
        ("srun ", "srun --gpu-bind=closest ", "hidden GPUs", 9),
        ('--cpus-per-task="$SLURM_CPUS_PER_TASK" ', "", "one processor", 9),
        ("train.py", "trian.py", "no file", 9),
        (TORCHRUN, "python prepare.py\n" + TORCHRUN, "no file", 9),
    ],
)
def test_each_mistake_is_found_on_its_line(
    tmp_path: Path, right: str, wrong: str, rule: str, line: int
) -> None:
    assert right in GOOD
    assert findings(tmp_path, GOOD.replace(right, wrong, 1)) == [(rule, line)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        (" train.py", " train.py # --node-rank=$SLURM_PROCID, MASTER_PORT=29500"),
        (TORCHRUN, f"srun -c4 bash -c 'echo $SLURM_PROCID'\n{TORCHRUN}"),
        (TORCHRUN, f'srun -c4 bash -c "echo \\$SLURM_PROCID"\n{TORCHRUN}'),
        (TORCHRUN, f"cat << 'END' > x.sh\necho $SLURM_PROCID; torchrun no.py\nEND\n{TORCHRUN}"),
        ("#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks-per-node=2 # ranks"),
        (" train.py", ' "$HOME/code/other.py"'),
        (TORCHRUN, "cd $SOMEWHERE\n" + TORCHRUN),
        ('--cpus-per-task="$SLURM_CPUS_PER_TASK" ', "-c 4 "),
        ("#SBATCH --nodes=2", '##SBATCH --x\n#SBATCH --nodes=2 --job-name="a # b"'),
    ],
)
def test_what_is_right_is_left_alone(tmp_path: Path, old: str, new: str) -> None:
    text = GOOD.replace(old, new, 1) if old else GOOD
    if "ntasks-per-node=2" in new:  # a task per rank, without an agent
        text = text.replace('torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 2', "python")
    assert findings(tmp_path, text) == []
