"""What scripts do with one GPU, as torch's documentation shows it. Each function is an example."""

import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import traceback

import torch
import torch.cuda.comm
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def device_objects():
    device = torch.device("cuda", 1)
    assert (device.type, device.index) == ("cuda", 1)
    assert torch.device(1) == torch.device("cuda:1") == device
    assert isinstance(device, torch.device) and type(device) == torch.device
    assert {torch.device: "found"}[type(device)] == "found"
    assert pickle.loads(pickle.dumps(device)) == copy.deepcopy(device) == device
    assert torch.ones(2, device=0).add(torch.ones(2, device=device)).sum() == 4


def device_as_context_and_default():
    with torch.device("cuda"):
        model = nn.Linear(3, 2)
        x = torch.randn(4, 3)
    assert model(x).shape == (4, 2)
    torch.set_default_device("cuda:0")
    assert (torch.arange(3) + torch.ones(3)).sum() == 6
    torch.set_default_device(None)


def tensors_move():
    x = torch.arange(6.0).view(2, 3)
    for y in (
        x.cuda(),
        x.cuda(1),
        x.to("cuda"),
        x.to("cuda:1", torch.float64),
        x.to(0),
        x.to(device=1, non_blocking=True),
        x.to(torch.device("cuda"), torch.float32, copy=True),
        x.to(torch.ones(1, device="cuda")),
    ):
        assert y.shape == x.shape and torch.equal(y.float().cpu(), x)
    assert x.to(torch.int64).dtype == torch.int64
    assert x.to("cuda", copy=True).data_ptr() != x.data_ptr()


def factories():
    shared = {"device": "cuda", "dtype": torch.float32}
    x = torch.zeros(2, 3, **shared)
    made = [
        torch.empty(3, **shared),
        torch.full((3,), 1.0, **shared),
        torch.eye(3, **shared),
        torch.linspace(0, 1, 3, **shared),
        torch.tensor([1.0, 2.0], **shared),
        torch.as_tensor([1.0], device=torch.device("cuda:0")),
        torch.asarray([1.0], device="cuda"),
        torch.randn(3, **shared),
        torch.randint(5, (3,), device="cuda"),
        torch.randperm(5, device=0),
        torch.normal(0.0, 1.0, (3,), device="cuda"),
        torch.ones_like(x, device="cuda"),
        torch.hann_window(8, device="cuda"),
        torch.fft.fftfreq(8, device="cuda"),
        torch.sparse_coo_tensor([[0]], [1.0], (3,), device="cuda"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda"),
        torch.tril_indices(3, 3, device="cuda"),
        x.new_zeros(3, device="cuda"),
        x.new_tensor([1.0], device="cuda:1"),
        torch.signal.windows.hann(8, device="cuda"),
        torch.distributions.Normal(torch.zeros(2, device="cuda"), 1.0).sample(),
    ]
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert pickle.loads(pickle.dumps(torch.zeros))(2).shape == (2,)


def legacy_types():
    x = torch.cuda.FloatTensor([1.0, 2.0])
    assert isinstance(x, torch.cuda.FloatTensor)
    assert x.type("torch.cuda.HalfTensor").dtype == torch.float16
    assert x.type(torch.cuda.LongTensor).dtype == torch.int64
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    assert torch.zeros(1).dtype == torch.float64
    torch.set_default_tensor_type(torch.FloatTensor)


def modules_move():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LSTM(4, 2))
    model.cuda().to("cuda:1").to(0).to(device="cuda").to(torch.device("cuda", 1), torch.float64)
    assert next(model.parameters()).dtype == torch.float64
    meta = nn.Linear(3, 2, device="meta").to_empty(device="cuda")
    assert meta.weight.device.type == "cpu"
    assert nn.Linear(3, 2, device="cuda").cpu()(torch.ones(1, 3)).shape == (1, 2)
    assert nn.utils.rnn.pack_sequence([torch.ones(2, 1)]).to("cuda").data.shape == (2, 1)


def data_parallel_has_one_device():
    model = nn.DataParallel(nn.Linear(3, 2), device_ids=[0, 1]).cuda()
    model(torch.ones(4, 3, device="cuda")).sum().backward()
    assert model.module.weight.grad is not None


def pinned_memory():
    x = torch.ones(4)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned[1:].is_pinned() and not x.is_pinned()
    assert pinned.data_ptr() != x.data_ptr() and pinned.pin_memory() is pinned
    assert torch.empty(3, pin_memory=True).is_pinned()


class Pair:
    def __init__(self, rows):
        self.rows = torch.stack([row for (row,) in rows])

    def pin_memory(self):
        self.rows = self.rows.pin_memory()
        return self


def loaders_pin_memory():
    data = TensorDataset(torch.arange(6.0))
    for workers in (0, 1):
        for batch in DataLoader(data, 2, pin_memory=True, num_workers=workers):
            assert batch[0].is_pinned()
        for pair in DataLoader(data, 2, pin_memory=True, num_workers=workers, collate_fn=Pair):
            assert pair.rows.is_pinned() and pair.rows.to("cuda", non_blocking=True).shape == (2,)


def current_device():
    torch.cuda.set_device(1)
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 1
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(torch.device("cuda:0")), torch.accelerator.device_index(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 1
    torch.cuda.set_device("cuda:0")


def what_the_machine_has():
    assert torch.cuda.is_available() and torch.accelerator.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 2
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.version.cuda >= "11.0" and torch.backends.cuda.is_built()
    assert torch.backends.cudnn.version() > 8000
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    assert properties.total_memory == total >= free > 0
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    assert torch.cuda.get_device_name(0) == properties.name
    assert torch.cuda.is_bf16_supported() and torch.cuda.nccl.version() >= (2, 10)
    assert torch.get_device_module("cuda") is torch.cuda


def memory_figures():
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.cuda.max_memory_allocated("cuda:0") == torch.cuda.memory_reserved() == 0
    figures = torch.cuda.memory_stats()
    assert figures["allocated_bytes.all.peak"] == figures["num_ooms"] == 0 and len(figures) > 100
    assert torch.cuda.memory.memory_stats()["num_alloc_retries"] == 0
    assert torch.cuda.memory_summary() == "" and torch.cuda.memory_snapshot() == []
    torch.cuda.memory._record_memory_history(max_entries=1000)


def streams_and_events():
    stream = torch.cuda.Stream(device=0, priority=-1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        x = torch.ones(3, device="cuda")
        x.record_stream(stream)
        event = stream.record_event()
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    torch.cuda.current_stream().wait_event(event)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0 and end.query() and stream.query()
    assert isinstance(stream, torch.cuda.Stream) and torch.Stream(device="cuda").query()
    with torch.Stream(device="cuda") as generic:
        assert torch.accelerator.current_stream() is generic


def mixed_precision():
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for autocast in (
        torch.autocast("cuda", torch.float16, True),
        torch.autocast(device_type="cuda", dtype=torch.bfloat16),
        torch.amp.autocast("cuda"),
        torch.cuda.amp.autocast(),
    ):
        with autocast:
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            loss = model(torch.ones(4, 3, device="cuda"))
            assert loss.dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
        scaler.scale(loss.float().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    other = torch.cuda.amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == scaler.get_scale()


def own_functions_in_mixed_precision():
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype == torch.float32
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.ones(2, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert x.grad.sum() == 4


def random_numbers():
    torch.cuda.manual_seed_all(3)
    generator = torch.Generator(device="cuda").manual_seed(1)
    first = torch.rand(3, device="cuda", generator=generator)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator("cuda:1").manual_seed(1)))
    assert isinstance(generator, torch.Generator)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state, device="cuda:0")
    with torch.random.fork_rng(devices=[0, 1]):
        torch.rand(1, device="cuda")


def snapshots():
    path = f"{os.environ.get('EXAMPLES', '.')}/snapshot.pt"
    torch.save({"weights": torch.ones(3, device="cuda"), "device": torch.device("cuda:1")}, path)
    for location in ("cuda:0", torch.device("cuda"), {"cuda:0": "cuda:1"}, lambda storage, _: storage):
        assert torch.load(path, map_location=location)["weights"].sum() == 3
        assert torch.load(path, location, weights_only=False)["device"].index == 1
    assert torch.load is torch.serialization.load


def functions_with_two_names():
    import torch.distributed as dist

    assert torch.load is torch.serialization.load and torch.save is torch.serialization.save
    c10d = dist.distributed_c10d
    assert all(getattr(dist, name) is getattr(c10d, name) for name in ("all_gather", "barrier"))
    assert dist.init_device_mesh is dist.device_mesh.init_device_mesh


def recomputed_activations():
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).cuda()
    x = torch.ones(2, 3, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert x.grad is not None


def marks_and_profiles():
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.range_push("forward")
        torch.cuda.nvtx.range_pop()
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.profiler.stop()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(3, device="cuda").add(1)
    assert profile.key_averages()


def scripted_functions():
    def add_ones(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        return x.to(device) + torch.ones(3) + torch.zeros(3)

    scripted = torch.jit.script(add_ones)
    assert scripted(torch.ones(3), torch.device("cpu")).sum() == 6


def traced_functions():
    graph = torch.fx.symbolic_trace(lambda x: torch.ones_like(x) + x.to("cuda"))
    assert graph(torch.ones(3)).sum() == 6


def other_threads_and_backward_hooks():
    devices = []

    def make(gradient):
        devices.append(torch.zeros(1, device="cuda").to(0).cuda().device.type)
        return gradient.to("cuda")

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.to("cuda:0")

        @staticmethod
        def backward(ctx, gradient):
            return make(gradient)

    def run():
        x = torch.ones(3, device="cuda", requires_grad=True)
        x.register_hook(make)
        x.register_post_accumulate_grad_hook(lambda leaf: (make(leaf.grad), None)[1])
        layer = nn.Linear(3, 1).cuda()
        layer.register_full_backward_hook(lambda *_: (make(x), None)[1])
        Through.apply(layer(x)).sum().backward()

    run()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert devices == ["cpu"] * 8


class OnGpu(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        return torch.full((2,), index, device="cuda").to(torch.device(0)).cuda()


def loader_workers():
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(OnGpu(), 2, num_workers=1, multiprocessing_context=method)
        assert [batch.sum().item() for batch in loader] == [2, 10]


def child_processes():
    line = "import torch; print(torch.cuda.device_count(), torch.ones(2).cuda().sum().item())"
    child = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert child.stdout == "2 2.0\n"


def refused_by_name():
    graph = torch.cuda.graphs.CUDAGraph
    refused = {
        "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
        "torch.cuda.graph": lambda: torch.cuda.graph(object()),
        "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(len, ()),
        "torch.cuda.MemPool": lambda: torch.cuda.MemPool(),
        "torch.cuda.caching_allocator_alloc": lambda: torch.cuda.caching_allocator_alloc(16),
        "torch.cuda.nccl.all_reduce": lambda: torch.cuda.nccl.all_reduce([torch.ones(1)]),
        "torch.cuda.comm.broadcast": lambda: torch.cuda.comm.broadcast(torch.ones(1), [0, 1]),
        "SimulatedStream has no native_handle": lambda: torch.cuda.Stream().native_handle,
        "C++ code that takes a CUDA device": lambda: torch._C._VariableFunctions.zeros(2, device="cuda"),
    }
    for name, use in refused.items():
        try:
            use()
        except RuntimeError as error:
            assert name in str(error) and "not simulated" in str(error), error
        else:
            raise AssertionError(name)
    assert not isinstance(object(), graph) and not torch.cuda.is_current_stream_capturing()


EXAMPLES = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__]


def main():
    results = {}
    for example in EXAMPLES:
        if isinstance(example, type):
            continue
        try:
            example()
            results[example.__name__] = ""
        except Exception:
            results[example.__name__] = traceback.format_exc()
    print(json.dumps(results))
    sys.exit(any(results.values()))


if __name__ == "__main__":
    main()
