"""The source of a checked script: what is in its code, and what is only said about it."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest
from test_check_rules import CASES

from check_recordings import rules_of
from stepladder.tools.check.rules.all_rules import apply_source_rules
from stepladder.tools.check.script_source import read_source

CORPUS = Path(__file__).parents[2] / "check_corpus"
# Words of libraries, functions and arguments that rules and starts have looked for.
WORDS = """
    torch.distributed init_process_group destroy_process_group accelerate lightning RANK WORLD_SIZE
    LOCAL_RANK local_rank torch.multiprocessing dist. mp.spawn( start_processes( spawn( MASTER_ADDR
    cuda nccl torch.accelerator is_available current_accelerator device_count() pipeline tensor_parallel
    DeviceMesh init_device_mesh parallelize_module rpc init_rpc Store( horovod mpi4py deepspeed transformers
    DistributedDataParallel FullyShardedDataParallel fully_shard SyncBatchNorm convert_sync_batchnorm
    GradScaler .scale( unscale_ set_epoch epoch optim .step( update_bn swa_utils gather_for_metrics
    get_rank get_world_size nodes no_sync require_backward_grad_sync autocast map_location weights_only
    torch.save torch.load state_dict zero_grad eval() no_grad inference_mode drop_last shuffle sampler
    DistributedSampler num_workers worker_init_fn manual_seed generator all_reduce all_gather broadcast
    reduce_scatter barrier monitored_barrier Join ZeroRedundancyOptimizer clip_grad_norm_ compile
    """.split()  # noqa: SIM905
SCRIPTS = sorted(path.name for path in CORPUS.glob("*.py"))[::12]  # each has all words


def with_words(text: str) -> str:
    """Return a script that has all words as a comment, a docstring, strings and variables."""
    words = " ".join(WORDS)
    names = "\n".join(f"{word} = 0" for word in WORDS if word.isidentifier())
    return (
        f"{text}\n# {words}\n# the input pipeline; lightning fast; TODO: try SyncBatchNorm\n"
        f'def explain_nothing():\n    """{words}"""\n{indent(names, "    ")}\n\n\n'
        f'UNUSED_WORDS = "{words}"\n"{words}"\nprint("{words}")\n'
    )


def test_there_are_eighty_words() -> None:
    assert len(set(WORDS)) >= 80


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_in_a_source_change_no_finding_of_a_rule_that_reads_it(
    name: str, tmp_path: Path
) -> None:
    script = tmp_path / name
    script.write_text((CORPUS / name).read_text())
    findings = apply_source_rules(read_source(script, tmp_path))
    script.write_text(with_words(script.read_text()))
    assert apply_source_rules(read_source(script, tmp_path)) == findings


@pytest.mark.parametrize("name", CASES)
def test_words_in_a_source_change_no_finding_of_a_rule_that_reads_a_recording(name: str) -> None:
    rule, *ranks = CASES[name]
    assert rules_of(*ranks, text=with_words("")) == [rule]


def test_modules_are_found_beside_the_script_by_what_files_of_packages_import(
    tmp_path: Path,
) -> None:
    texts = {
        "train.py": "from models.net import Net\n",
        "models/__init__.py": "",
        "models/net.py": "from .parts import blocks\nimport layers.linear\n",
        "models/parts/__init__.py": "",
        "models/parts/blocks.py": "from ..tools import size\n",
        "models/tools.py": "",
        "layers/__init__.py": "",
        "layers/linear.py": "import data\n",
        "data.py": "",
        "layers/data.py": "",
        "tools.py": "raise SystemExit  # another one\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    source = read_source(tmp_path / "train.py", tmp_path)
    assert {file.name for file in source.files} == texts.keys() - {"tools.py"}
