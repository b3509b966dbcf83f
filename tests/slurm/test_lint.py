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
        ("torchrun", "accelerate launch --num_machines 2", "two counts", 9),
        ("torchrun", "accelerate launch --main_process_port 29501", "fixed port", 9),
        ("TERM@120", "USR1@120", "deadly signal", 9),
        ("TERM@120", "B:USR1@120", "no trap", 5),
        ("TERM@120\n", "TERM@120\n#SBATCH --error=logs/%j\n", "no folder", 6),
        ("#!/bin/bash\n", "", "no shell", 1),
        ("#!/bin/bash", "#!/bin/bash\r", "line ends", 1),
        (" torchrun", " bash -c 'MASTER_ADDR=$(hostname) python train.py'; true", "own master", 9),
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


HEADER = "#!/bin/bash\n#SBATCH --signal=TERM@60\n#SBATCH --requeue\n"
TWO = HEADER + "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n"
SHELL = HEADER.replace("TERM@60", "B:USR1@60")
# Right scripts of every kind.
RIGHT = {
    "run starts itself": TWO + "stepladder run --nproc 2 train.py",
    "train starts itself": TWO + "stepladder train digits --nproc 2",
    "the tasks of a step join": TWO + "srun --ntasks-per-node=1 stepladder run --nproc 2 train.py",
    "tasks are ranks": TWO.replace("node=1", "node=2") + "srun -n 2 -N 1 stepladder run train.py",
    "an array": HEADER + "#SBATCH --array=0-3\nsrun python train.py --seed $SLURM_ARRAY_TASK_ID",
    "two parts": TWO + "#SBATCH hetjob\n#SBATCH --nodes=1\nsrun --het-group=0,1 python train.py",
    "a container": TWO + "srun apptainer exec --nv x.sif torchrun --nnodes $SLURM_NNODES train.py",
    "conda": TWO + "source ~/conda.sh\nconda activate x\nsrun python train.py",
    "exec": SHELL + "exec srun python train.py",
    "a loop of steps": HEADER + "for x in 1 2; do\n  srun -n1 python train.py $x\ndone",
    "steps side by side": HEADER + "srun -n1 python train.py &\nsrun -n1 python train.py &\nwait",
    "a trap and wait": SHELL
    + "trap 'kill -USR1 $pid' USR1\nsrun python train.py &\npid=$!\nwait\nwait",
    "set -e": TWO + "set -euo pipefail\nsrun python train.py || code=$?\nexit ${code:-0}",
    "a text": TWO + 'echo "torchrun starts now; srun"\nsrun python train.py',
    "a here-document": TWO + "cat > x.sh <<END\ntorchrun train.py\nEND\nsrun bash x.sh",
    "mpirun": TWO + "mpirun -n 2 python train.py",
    "a node's number in the task": TWO
    + "srun bash -c 'torchrun --node-rank $SLURM_NODEID train.py'",
    "the first node": TWO + "export MASTER_ADDR=$(hostname)\nsrun python train.py",
    "one node of its own": HEADER + "srun bash -c 'MASTER_ADDR=localhost python train.py'",
    "a script that may start steps": HEADER + "bash train.sh",
    "a group in the background": SHELL + "trap : USR1\n{ srun python train.py; } &\nwait\nwait",
    "a signal's number": SHELL.replace("USR1", "10") + "trap : USR1\nsrun python train.py & wait",
    "a pipe": TWO + "srun python train.py 2>&1 | tee log &> /dev/null",
}
WRONG = {
    "a trap in the foreground": (
        SHELL + "trap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun python train.py",
        ["late trap"],
    ),
    "no trap": (SHELL + "srun python train.py", ["no trap"]),
    "no task": (HEADER + "python train.py", ["unseen signal"]),
    "no task of an agent": (HEADER + "stepladder run --nproc 2 train.py", ["unseen signal"]),
    "torchrun after USR1": (
        HEADER.replace("TERM", "USR1") + "srun torchrun --standalone train.py",
        ["deadly signal"],
    ),
    "tasks and ranks": (TWO + "srun stepladder train digits --nproc 2", ["ranks and tasks"]),
    "an agent per rank": (
        TWO.replace("node=1", "node=2") + "srun stepladder run --nproc 2 train.py",
        ["tasks and agents"],
    ),
    "each its own master": (
        TWO + "srun bash -c 'export MASTER_ADDR=$(hostname); python train.py'",
        ["own master"],
    ),
    "localhost on two nodes": (
        TWO + "srun bash -c 'MASTER_ADDR=127.0.0.1 python train.py'",
        ["own master"],
    ),
    "no folder": (HEADER + "#SBATCH -o out/%A.out\nsrun python train.py", ["no folder"]),
    "an agent after another command": (TWO + "cd . && torchrun train.py", ["no srun"]),
    "expanded in a here-document": (
        TWO + "srun bash <<END\npython train.py --rank $SLURM_PROCID\nEND",
        ["expanded early"],
    ),
}


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_right_scripts_have_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("x.sh", "train.sh"):
        (tmp_path / name).touch()
    assert findings(tmp_path, text) == []


@pytest.mark.parametrize(("text", "rules"), WRONG.values(), ids=WRONG)
def test_wrong_scripts_have_their_cause(tmp_path: Path, text: str, rules: list[str]) -> None:
    assert [rule for rule, _ in findings(tmp_path, text)] == rules
