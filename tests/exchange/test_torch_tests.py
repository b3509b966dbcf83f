"""Torch's own tests of torch.distributed, with shared memory in gloo's place: forty of them.
`make torch-tests` runs all, on both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import SECONDS

HARNESS = Path(__file__).parents[2] / "benchmarks" / "torch_tests.py"
TESTS = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather",
    "test_all_gather_coalesced_complex",
    "test_all_gather_coalesced_simple",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_default_pg",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_max",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_sum",
    "test_all_reduce_max",
    "test_all_reduce_min",
    "test_all_reduce_product",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_reduce_sum_complex",
    "test_barrier",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo",
    "test_broadcast",
    "test_ddp_create_graph",
    "test_ddp_logging_data_cpu",
    "test_destroy_group",
    "test_gather",
    "test_get_future",
    "test_grads_same_across_ranks_with_no_sync",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_reduce_sum",
    "test_scatter",
    "test_scatter_object_list",
    "test_sparse_all_reduce_sum",
    "test_static_graph_api_cpu",
]


@pytest.mark.ranks
@pytest.mark.slow
def test_forty_of_torchs_own_tests_pass_on_shared_memory(tmp_path: Path) -> None:
    file = tmp_path / "outcomes.json"
    env = {
        **os.environ,
        "EXCHANGE": "stepladder",
        "WORLD_SIZE": "2",
        "TEMP_DIR": str(tmp_path),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    subprocess.run(
        [sys.executable, HARNESS, "--to", file, "--only", *TESTS],
        env=env,
        cwd=tmp_path,
        check=True,
        timeout=2 * SECONDS,
    )
    outcomes = json.loads(file.read_text())
    assert len(outcomes) == 40
    assert {name: why for name, (end, why) in outcomes.items() if end != "passed"} == {}
