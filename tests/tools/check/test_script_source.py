"""The source of a checked script: what is in its code, and what is only said about it."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    """Return a script that has all words as a comment, a docstring and an unused string."""
    words = " ".join(WORDS)
    return (
        f"{text}\n# {words}\n"
        f'def explain_nothing():\n    """{words}"""\n\n\nUNUSED_WORDS = "{words}"\n'
        f'"{words}"\n'
    )


def test_there_are_eighty_words() -> None:
    assert len(set(WORDS)) >= 80


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_in_comments_and_unused_strings_are_not_code(name: str, tmp_path: Path) -> None:
    """All that rules and starts read of a source as text is its code."""
    script = tmp_path / name
    script.write_text((CORPUS / name).read_text())
    code = read_source(script, tmp_path).files[0].code
    script.write_text(with_words(script.read_text()))
    added = "\n\ndef explain_nothing():\n    pass\npass\npass"
    assert read_source(script, tmp_path).files[0].code == code + added


def test_a_string_that_is_read_is_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('NAME = "LOCAL_RANK"\nimport os\nrank = os.environ[NAME]\n')
    assert read_source(script, tmp_path).contains("LOCAL_RANK")
